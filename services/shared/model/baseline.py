"""A baseline for every model: logistic regression on character n-grams, trained on the same labelled texts.

N-grams are hashed, so that memory is bounded and no further dependency is needed: what scikit-learn's
HashingVectorizer(analyzer="char", ngram_range=(1, 3)), TfidfTransformer(sublinear_tf=True) and
LogisticRegression do together.

Legend: N texts, C classes of a head, F features (hash buckets), M n-grams of all texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.shared.datasets.card import Head, HeadType
from services.shared.datasets.text import plain_text
from services.shared.model.metrics import Array, head_metrics, labelled_mask, predict
from services.shared.model.tokens import Rows

MAX_TRAINING_TEXTS = 50_000
MAX_CLASSES = 128  # more are not worth the memory of F * C weights and their L-BFGS history
_NUM_FEATURES = 2**18
_MAX_WEIGHTS = 2**21
_MAX_CHARACTERS = 1_000
_NGRAMS = (1, 2, 3)
_PENALTY = 0.1  # L2, over the sum of the losses: scikit-learn's C = 10
_ITERATIONS = 40
_RESAMPLES = 500


class Interval(TypedDict):
    """A bootstrap interval of 95 %."""

    low: float
    high: float


class BaselineReport(TypedDict):
    """The scores of the baseline of one head, on the texts that the model was evaluated on."""

    accuracy: float
    macro_f1: float
    accuracy_interval: Interval
    training_texts: int


@dataclass(frozen=True)
class _Vectors:
    """Sparse rows: the features of text i are [offsets[i], offsets[i + 1])."""

    features: Tensor  # int64 [M]
    weights: Tensor  # float32 [M]
    offsets: Tensor  # int64 [N]


def add_baseline(
    evaluation: Any, heads: Sequence[Head], *, train: Rows, held_out: Rows, seed: int
) -> None:
    """Add `baseline` to each head of an evaluation, except heads of more than MAX_CLASSES classes."""
    for head in heads:
        report = baseline(head, train=train, held_out=held_out, seed=seed)
        if report is not None:
            evaluation["heads"][head.name]["baseline"] = report


def baseline(head: Head, *, train: Rows, held_out: Rows, seed: int) -> BaselineReport | None:
    """Train on the labelled texts of `train` and score on `held_out`; None where that is not possible."""
    labels = train.labels[head.name]
    chosen = np.flatnonzero(labelled_mask(head, labels))
    scored = np.flatnonzero(labelled_mask(head, held_out.labels[head.name]))
    if len(head.labels) > MAX_CLASSES or not len(chosen) or not len(scored):
        return None
    generator = np.random.default_rng(seed)
    if len(chosen) > MAX_TRAINING_TEXTS:
        chosen = np.sort(generator.choice(chosen, MAX_TRAINING_TEXTS, replace=False))
    num_features = _NUM_FEATURES
    while num_features * len(head.labels) > _MAX_WEIGHTS:
        num_features //= 2
    counts, tests = (
        _count([plain_text(rows.texts[int(i)]) for i in numbers], num_features)
        for rows, numbers in ((train, chosen), (held_out, scored))
    )
    frequency = torch.bincount(counts.features, minlength=num_features)
    idf = torch.log((1 + len(chosen)) / (1 + frequency)) + 1
    logits = _fit(
        _scaled(counts, idf), _scaled(tests, idf), head, labels[chosen], num_features=num_features
    )
    truth = held_out.labels[head.name][scored]
    predicted = predict(head, logits)
    metrics = head_metrics(head, predicted=predicted, labels=truth)
    correct = (predicted == truth).reshape(len(truth), -1).all(axis=1)
    return {
        "accuracy": metrics.accuracy,
        "macro_f1": metrics.macro_f1,
        "accuracy_interval": mean_interval(correct, seed=seed),
        "training_texts": len(chosen),
    }


def mean_interval(values: Array, *, seed: int) -> Interval:
    """Return the bootstrap interval of the mean of values [N], with resamples drawn from the seed."""
    generator = np.random.default_rng(seed)
    size = len(values)
    means = [values[generator.integers(0, size, size)].mean() for _ in range(_RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return {"low": float(low), "high": float(high)}


def _count(texts: Sequence[str], num_features: int) -> _Vectors:
    """Return the hashed n-grams of each text with 1 + log of their counts."""
    features, weights, sizes = [], [], []
    for text in texts:
        codes = np.frombuffer(text[:_MAX_CHARACTERS].lower().encode("utf-32-le"), "<u4")
        hashes = [_hashes(codes.astype(np.uint64), length) for length in _NGRAMS]
        found, counts = np.unique(np.concatenate(hashes) % num_features, return_counts=True)
        features.append(found.astype(np.int64))
        weights.append((1 + np.log(counts)).astype(np.float32))
        sizes.append(len(found))
    offsets = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(np.int64)
    return _Vectors(
        torch.from_numpy(np.concatenate(features)),
        torch.from_numpy(np.concatenate(weights)),
        torch.from_numpy(offsets),
    )


def _hashes(codes: Array, length: int) -> Array:
    """Return a 64-bit hash of each n-gram of the given length (multiplicative, wrapping)."""
    count = max(0, len(codes) - length + 1)
    hashes = np.full(count, length, np.uint64)
    for start in range(length):
        hashes = (hashes ^ codes[start : start + count]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    return hashes


def _scaled(vectors: _Vectors, idf: Tensor) -> _Vectors:
    """Weight by inverse document frequency and scale each text to length 1."""
    weights = vectors.weights * idf[vectors.features]
    rows = torch.zeros(len(weights), dtype=torch.int64)
    starts = vectors.offsets[1:]
    rows.index_add_(0, starts[starts < len(rows)], torch.ones_like(starts[starts < len(rows)]))
    rows = rows.cumsum(0)
    squares = torch.zeros(len(vectors.offsets)).index_add_(0, rows, weights**2)
    return _Vectors(vectors.features, weights / squares.sqrt()[rows], vectors.offsets)


def _fit(
    train: _Vectors, tests: _Vectors, head: Head, labels: Array, *, num_features: int
) -> Array:
    """Return the logits [N, C] of the test texts."""
    weight = torch.zeros(num_features, len(head.labels), requires_grad=True)
    bias = torch.zeros(len(head.labels), requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=_ITERATIONS, history_size=8, line_search_fn="strong_wolfe"
    )
    target = torch.from_numpy(labels)

    def logits_of(vectors: _Vectors) -> Tensor:
        return bias + functional.embedding_bag(
            vectors.features,
            weight,
            vectors.offsets,
            mode="sum",
            per_sample_weights=vectors.weights,
        )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits = logits_of(train)
        if head.type is HeadType.MULTI_LABEL:
            error = functional.binary_cross_entropy_with_logits(logits, target, reduction="sum")
        else:
            error = functional.cross_entropy(logits, target.long(), reduction="sum")
        total = (error + _PENALTY / 2 * weight.square().sum()) / len(target)
        total.backward()  # type: ignore[no-untyped-call]
        return total

    with torch.enable_grad():
        optimizer.step(loss)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        found: Mapping[str, Tensor] = {"logits": logits_of(tests)}
    return np.asarray(found["logits"].numpy())
