"""A baseline for every model: logistic regression on character n-grams, trained on the same labelled texts.

What scikit-learn's TfidfVectorizer and LogisticRegression(C=10) do together, in bounded memory and without a
further dependency; `make bench-baseline` compares the two.

Legend: N texts, C classes of a head, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.shared.datasets.card import Head, HeadType
from services.shared.datasets.text import plain_text
from services.shared.model.metrics import Array, labelled_mask, predict
from services.shared.model.ngrams import MAX_CHARACTERS, SparseVectors, fit_vectorizer
from services.shared.model.tokens import Rows

MAX_TRAINING_TEXTS = 50_000
MAX_TRAINING_CHARACTERS = 5_000_000
MAX_CLASSES = 128  # more are not worth the memory of F * C weights and their L-BFGS history
_MAX_FEATURES = 2**18
_MAX_WEIGHTS = 2**21
_PENALTY = 0.1  # L2, over the sum of the losses: scikit-learn's C = 10
_ITERATIONS = 100
_HISTORY = 10
FOLDS = 4
MAX_FOLD_TEXTS = 30_000
_FOLD_ITERATIONS = 30  # the order of the confidences hardly changes after them


@dataclass(frozen=True)
class Baseline:
    """What the baseline of one head predicts for the held-out texts."""

    predicted: Array  # [N], or booleans [N, C] of a multi-label head
    training_texts: int


@dataclass(frozen=True)
class _Bags:
    """The rows of a sparse matrix, as `embedding_bag` takes them."""

    indices: Tensor  # int64
    weights: Tensor  # float32
    offsets: Tensor  # int64, one for each row

    def times(self, matrix: Tensor) -> Tensor:
        """Return the product with a dense matrix."""
        return functional.embedding_bag(
            self.indices, matrix, self.offsets, mode="sum", per_sample_weights=self.weights
        )


def fit_baselines(
    heads: Sequence[Head], *, train: Rows, held_out: Rows, seed: int
) -> dict[str, Baseline]:
    """Train on the labelled texts of `train` and predict `held_out`, head by head.

    Heads of more than MAX_CLASSES classes, and those without labelled texts, have no baseline.
    """
    if not len(held_out):
        return {}
    held_out_texts = [plain_text(text) for text in held_out.texts]
    found = {}
    for head in heads:
        chosen = _training_texts(head, train, seed=seed)
        if len(head.labels) > MAX_CLASSES or not len(chosen):
            continue
        texts = [plain_text(train.texts[int(i)]) for i in chosen]
        max_features = min(_MAX_FEATURES, _MAX_WEIGHTS // len(head.labels))
        vectorizer = fit_vectorizer(texts, max_features=max_features)
        vectors = vectorizer.transform(texts)
        weight, bias = _fit(vectors, head, train.labels[head.name][chosen], len(vectorizer.idf))
        logits = _bags(vectorizer.transform(held_out_texts)).times(weight) + bias
        found[head.name] = Baseline(predict(head, logits.numpy()), len(chosen))
    return found


def fold_logits(
    head: Head, rows: Rows, *, seed: int, folds: int = FOLDS
) -> tuple[Array, Array] | None:
    """Return the numbers [N] of labelled texts, and logits [N, C] by a baseline of the other folds.

    None where there are too many classes or too few texts. A large dataset is examined in part.
    """
    chosen = _training_texts(head, rows, seed=seed)
    if len(chosen) > MAX_FOLD_TEXTS:
        picked = np.random.default_rng(seed).permutation(len(chosen))[:MAX_FOLD_TEXTS]
        chosen = np.sort(chosen[picked])
    if len(head.labels) > MAX_CLASSES or len(chosen) < 2 * folds:
        return None
    texts = [plain_text(rows.texts[int(i)]) for i in chosen]
    labels = rows.labels[head.name][chosen]
    vectorizer = fit_vectorizer(
        texts, max_features=min(_MAX_FEATURES, _MAX_WEIGHTS // len(head.labels))
    )
    fold = np.random.default_rng(seed).permutation(len(chosen)) % folds
    logits = np.zeros((len(chosen), len(head.labels)), np.float32)
    for number in range(folds):
        inside, outside = np.flatnonzero(fold == number), np.flatnonzero(fold != number)
        vectors = vectorizer.transform([texts[i] for i in outside])
        weight, bias = _fit(
            vectors, head, labels[outside], len(vectorizer.idf), iterations=_FOLD_ITERATIONS
        )
        tested = _bags(vectorizer.transform([texts[i] for i in inside]))
        logits[inside] = (tested.times(weight) + bias).numpy()
    return chosen, logits


def _training_texts(head: Head, train: Rows, *, seed: int) -> Array:
    """Return the numbers of the labelled texts, or of a random part of bounded size, in their order."""
    chosen = np.flatnonzero(labelled_mask(head, train.labels[head.name]))
    lengths = np.array(
        [min(MAX_CHARACTERS, len(plain_text(train.texts[int(i)]))) for i in chosen], np.int64
    )
    if len(chosen) <= MAX_TRAINING_TEXTS and lengths.sum() <= MAX_TRAINING_CHARACTERS:
        return chosen
    order = np.random.default_rng(seed).permutation(len(chosen))[:MAX_TRAINING_TEXTS]
    fits = lengths[order].cumsum() <= MAX_TRAINING_CHARACTERS
    return np.sort(chosen[order[fits]])


@torch.no_grad()
def _fit(
    vectors: SparseVectors,
    head: Head,
    labels: Array,
    num_features: int,
    *,
    iterations: int = _ITERATIONS,
) -> tuple[Tensor, Tensor]:
    """Return the weight [F, C] and the bias [C] that minimise the penalised loss."""
    rows, columns = _bags(vectors), _transposed(vectors, num_features)
    weight, bias = torch.zeros(num_features, len(head.labels)), torch.zeros(len(head.labels))
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=iterations, history_size=_HISTORY, line_search_fn="strong_wolfe"
    )
    target = torch.from_numpy(labels)
    if head.type is HeadType.SINGLE_LABEL:
        target = functional.one_hot(target.long(), len(head.labels)).float()

    @torch.no_grad()
    def loss() -> Tensor:
        logits = rows.times(weight) + bias
        if head.type is HeadType.MULTI_LABEL:
            error = functional.binary_cross_entropy_with_logits(logits, target, reduction="sum")
            residual = logits.sigmoid() - target
        else:
            error = functional.cross_entropy(logits, target, reduction="sum")
            residual = logits.softmax(dim=1) - target
        # By hand: autograd's gradient of embedding_bag takes ten times as long.
        weight.grad = (columns.times(residual) + _PENALTY * weight) / len(target)
        bias.grad = residual.sum(dim=0) / len(target)
        total: Tensor = (error + _PENALTY / 2 * weight.square().sum()) / len(target)
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weight, bias


def _bags(vectors: SparseVectors) -> _Bags:
    return _Bags(
        torch.from_numpy(vectors.features),
        torch.from_numpy(vectors.weights),
        torch.from_numpy(vectors.offsets[:-1]),
    )


def _transposed(vectors: SparseVectors, num_features: int) -> _Bags:
    """Return a row for each feature: the texts that contain it."""
    texts = np.repeat(np.arange(len(vectors.offsets) - 1), np.diff(vectors.offsets))
    order = np.argsort(vectors.features, kind="stable")
    counts = np.bincount(vectors.features, minlength=num_features)
    offsets = np.concatenate([[0], np.cumsum(counts)[:-1]])
    return _Bags(
        torch.from_numpy(texts[order]),
        torch.from_numpy(vectors.weights[order]),
        torch.from_numpy(offsets),
    )
