"""The supervised objective: one masked loss per head.

Legend: B texts of a micro-batch, C classes of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from services.shared.datasets.card import Head, HeadType
from services.shared.model.metrics import MISSING, Array, labelled_mask


@dataclass(frozen=True)
class LossSum:
    """A sum over the labelled texts of a micro-batch; divide by the count of the whole step."""

    total: Tensor  # float32 scalar with gradient, 0 where no text carries a label
    count: int | Tensor  # labelled texts


def supervised_loss(
    logits: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    heads: Sequence[Head],
    class_weights: Mapping[str, Tensor] | None = None,
) -> dict[str, LossSum]:
    """Return the summed loss by head: cross-entropy, or for multi-label binary cross-entropy.

    `logits[head]` is [B, C], `labels[head]` int64 [B] with -100 or float32 [B, C] with NaN rows,
    `class_weights[head]` [C]. The loss of a multi-label text is the mean over its classes.
    """
    weights = class_weights or {}
    return {
        head.name: head_loss(
            head, logits[head.name], labels[head.name], weights=weights.get(head.name)
        )
        for head in heads
    }


def head_loss(
    head: Head, logits: Tensor, labels: Tensor, *, weights: Tensor | None = None
) -> LossSum:
    """Return the summed loss of one head over its labelled texts."""
    if head.type is HeadType.SINGLE_LABEL:
        present = labels != MISSING
        # With ignore_index the sum is 0, with a graph, even when no text carries a label.
        total = F.cross_entropy(
            logits, labels, weight=weights, ignore_index=MISSING, reduction="sum"
        )
        return LossSum(total, present.sum())
    present = ~labels.isnan().any(dim=1)
    each = F.binary_cross_entropy_with_logits(
        logits, labels.nan_to_num(), pos_weight=weights, reduction="none"
    )
    return LossSum((each.mean(dim=1) * present).sum(), present.sum())


def combined_loss(
    logits: Mapping[str, Tensor],
    labels: Mapping[str, Tensor],
    heads: Sequence[Head],
    counts: Mapping[str, int],
    weights: Mapping[str, Tensor] | None,
) -> Tensor:
    """Return this micro-batch's share of the step's loss, which is the mean over heads.

    Each head's sum is divided by its labelled texts in the whole step, so neither the number of
    ranks nor the split into micro-batches changes the gradient.
    """
    sums = supervised_loss(logits, labels, heads, weights)
    shares = [sums[head.name].total / max(1, counts[head.name]) for head in heads]
    return torch.stack(shares).sum() / len(heads)


def balanced_weights(heads: Sequence[Head], labels: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return class weights [C] by head that give rare classes the influence of frequent ones.

    Single-label: N / (C * n_c), so that the mean over the texts is 1 (King and Zeng 2001, as in
    scikit-learn's "balanced"); a class without texts gets 0. Multi-label: weight of the positives,
    negatives / positives, at most 100.
    """
    weights = {}
    for head in heads:
        values = labels[head.name]
        values = values[labelled_mask(head, values)]
        if head.type is HeadType.SINGLE_LABEL:
            counts = np.bincount(values, minlength=len(head.labels))
            balanced = len(values) / (len(head.labels) * np.maximum(counts, 1)) * (counts > 0)
        else:
            positives = values.sum(axis=0)
            balanced = np.clip((len(values) - positives) / np.maximum(positives, 1), 0.01, 100)
        weights[head.name] = torch.tensor(balanced, dtype=torch.float32)
    return weights


def labelled_counts(
    heads: Sequence[Head], labels: Mapping[str, Array], rows: Sequence[int]
) -> dict[str, int]:
    """Return the number of labelled texts among `rows`, by head: the denominators of a step."""
    chosen = np.asarray(rows, dtype=np.int64)
    return {head.name: int(labelled_mask(head, labels[head.name][chosen]).sum()) for head in heads}
