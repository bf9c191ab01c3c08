"""Classification metrics of one head, all derived from counts.

Legend: N texts, C classes. Texts without a label (-100, or a NaN row) are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt
from typing_extensions import NotRequired

from services.shared.datasets.card import Head, HeadType

Array = npt.NDArray[Any]
MISSING = -100
# A dense matrix of 10,000 labels takes 200 MB of JSON, in every evaluation, event and row of a job.
MAX_DENSE_LABELS = 50
MAX_CONFUSIONS = 50


class ClassReport(TypedDict):
    """The JSON form of ClassMetrics, by label."""

    precision: float
    recall: float
    f1: float
    support: int


class ConfusionReport(TypedDict):
    """How many texts of one class were predicted as another."""

    true: str
    predicted: str
    texts: int


class HeadReport(TypedDict):
    """The JSON form of HeadMetrics.

    Of a head with more than MAX_DENSE_LABELS labels, `classes` holds those with the lowest F1 among the
    labelled ones, `num_classes` says of how many, and `confusion` is empty.
    """

    texts: int
    accuracy: float
    macro_f1: float
    classes: dict[str, ClassReport]
    confusion: list[list[int]]
    num_classes: NotRequired[int]
    top_confusions: NotRequired[list[ConfusionReport]]  # single-label heads, most frequent first


@dataclass(frozen=True)
class ClassMetrics:
    """Metrics of one class."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int


@dataclass(frozen=True)
class Confusion:
    """How many texts of class `true` were predicted as class `predicted`."""

    true: str
    predicted: str
    texts: int


@dataclass(frozen=True)
class HeadMetrics:
    """Metrics of one head on one split.

    `confusion` is [C][C] counts, rows true and columns predicted, for a single-label head; for a
    multi-label head it is [C][4] counts of true positive, false positive, false negative, true negative.
    A head with more than MAX_DENSE_LABELS labels has `top_confusions` instead.
    """

    texts: int
    accuracy: float  # multi-label: the share of texts whose label set is predicted exactly
    macro_f1: float
    classes: tuple[ClassMetrics, ...]
    confusion: tuple[tuple[int, ...], ...]
    top_confusions: tuple[Confusion, ...] = ()

    def report(self) -> HeadReport:
        """Return the JSON form of reports and manifests."""
        is_large = len(self.classes) > MAX_DENSE_LABELS
        report: HeadReport = {
            "texts": self.texts,
            "accuracy": self.accuracy,
            "macro_f1": self.macro_f1,
            "classes": {
                c.label: {
                    "precision": c.precision,
                    "recall": c.recall,
                    "f1": c.f1,
                    "support": c.support,
                }
                for c in (_worst(self.classes) if is_large else self.classes)
            },
            "confusion": [list(row) for row in self.confusion],
        }
        if is_large:
            report["num_classes"] = len(self.classes)
            report["top_confusions"] = [
                {"true": c.true, "predicted": c.predicted, "texts": c.texts}
                for c in self.top_confusions
            ]
        return report


def predict(head: Head, logits: Array, thresholds: Array | None = None) -> Array:
    """Return predictions: class indices [N], or for a multi-label head booleans [N, C].

    A multi-label head predicts the classes whose logit is above `thresholds` [C], 0 by default.
    """
    if head.type is HeadType.MULTI_LABEL:
        return np.asarray(logits > (0 if thresholds is None else thresholds))
    return np.asarray(np.argmax(logits, axis=1))


def labelled_mask(head: Head, labels: Array) -> Array:
    """Return which texts carry a label: booleans [N]."""
    if head.type is HeadType.MULTI_LABEL:
        return np.asarray(~np.isnan(labels).any(axis=1))
    return np.asarray(labels != MISSING)


def head_metrics(head: Head, *, predicted: Array, labels: Array) -> HeadMetrics:
    """Compare predictions (see `predict`) with labels [N] or [N, C]."""
    keep = labelled_mask(head, labels)
    predicted, labels = predicted[keep], labels[keep]
    if head.type is HeadType.MULTI_LABEL:
        return _multi_label(head, predicted.astype(bool), labels > 0.5)
    return _single_label(head, predicted.astype(np.int64), labels.astype(np.int64))


def macro_f1(classes: Sequence[ClassMetrics], num_predicted: Sequence[int]) -> float:
    """Return the mean F1 over the classes that occur among labels or predictions.

    This is what scikit-learn's `f1_score(average="macro", zero_division=0)` computes.
    """
    seen = [c.f1 for c, n in zip(classes, num_predicted, strict=True) if c.support or n]
    return sum(seen) / len(seen) if seen else 0.0


def _single_label(head: Head, predicted: Array, labels: Array) -> HeadMetrics:
    size = len(head.labels)
    hits = np.bincount(labels[labels == predicted], minlength=size)
    num_predicted = np.bincount(predicted, minlength=size)
    support = np.bincount(labels, minlength=size)
    classes = _classes(head, hits, num_predicted, support)
    return HeadMetrics(
        texts=len(labels),
        accuracy=_ratio(hits.sum(), len(labels)),
        macro_f1=macro_f1(classes, num_predicted.tolist()),
        classes=classes,
        confusion=_dense_confusion(size, predicted, labels),
        top_confusions=_top_confusions(head, predicted, labels),
    )


def _dense_confusion(size: int, predicted: Array, labels: Array) -> tuple[tuple[int, ...], ...]:
    if size > MAX_DENSE_LABELS:
        return ()
    counts = np.bincount(labels * size + predicted, minlength=size * size).reshape(size, size)
    return tuple(tuple(row) for row in counts.tolist())


def _top_confusions(head: Head, predicted: Array, labels: Array) -> tuple[Confusion, ...]:
    """Return the most frequent pairs of a class and a wrong prediction, of a large head only."""
    size, wrong = len(head.labels), labels != predicted
    if size <= MAX_DENSE_LABELS:
        return ()
    pairs, counts = np.unique(labels[wrong] * size + predicted[wrong], return_counts=True)
    order = np.argsort(-counts, kind="stable")[:MAX_CONFUSIONS]
    return tuple(
        Confusion(
            head.labels[int(pairs[i] // size)], head.labels[int(pairs[i] % size)], int(counts[i])
        )
        for i in order
    )


def _worst(classes: Sequence[ClassMetrics]) -> list[ClassMetrics]:
    """Return MAX_DENSE_LABELS classes: labelled ones first, the lowest F1 first."""
    return sorted(classes, key=lambda c: (c.support == 0, c.f1))[:MAX_DENSE_LABELS]


def _multi_label(head: Head, predicted: Array, labels: Array) -> HeadMetrics:
    hits = (predicted & labels).sum(axis=0)
    num_predicted, support = predicted.sum(axis=0), labels.sum(axis=0)
    negatives = len(labels) - num_predicted - support + hits
    classes = _classes(head, hits, num_predicted, support)
    table = np.stack([hits, num_predicted - hits, support - hits, negatives], axis=1)
    return HeadMetrics(
        texts=len(labels),
        accuracy=_ratio((predicted == labels).all(axis=1).sum(), len(labels)),
        macro_f1=macro_f1(classes, num_predicted.tolist()),
        classes=classes,
        confusion=tuple(tuple(row) for row in table.tolist())
        if len(head.labels) <= MAX_DENSE_LABELS
        else (),
    )


def _classes(
    head: Head, hits: Array, num_predicted: Array, support: Array
) -> tuple[ClassMetrics, ...]:
    return tuple(
        ClassMetrics(
            label=label,
            precision=_ratio(hits[c], num_predicted[c]),
            recall=_ratio(hits[c], support[c]),
            f1=_ratio(2 * hits[c], num_predicted[c] + support[c]),
            support=int(support[c]),
        )
        for c, label in enumerate(head.labels)
    )


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else 0.0
