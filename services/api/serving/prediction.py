"""Predictions, and the conversion of logits to scores.

N texts, C labels of a head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.api.serving.errors import EngineFailed
from services.shared.datasets.card import Head, HeadType

FloatArray = NDArray[np.float32]


class Score(NamedTuple):
    """One label of one head; `score` is a probability.

    `predicted` is set for multi-label heads only; a single-label head predicts its first label.
    """

    label: str
    score: float
    logit: float
    predicted: bool | None = None


class Timing(NamedTuple):
    """Seconds that a text spent in each stage."""

    tokenise: float
    queue: float
    compute: float


@dataclass(frozen=True)
class Prediction:
    """The answer for one text: the scores of each head, highest first."""

    scores: dict[str, list[Score]]
    tokens: int
    truncated: bool
    model: str
    version: str
    timing: Timing


@dataclass(frozen=True)
class Calibration:
    """Temperatures and thresholds fitted on held-out texts after training; empty if none were."""

    temperature: Mapping[str, float] = field(default_factory=dict)  # head -> divisor of the logits
    # head -> label -> the probability above which a multi-label head predicts it, 0.5 by default
    thresholds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def score_logits(
    heads: Sequence[Head], calibration: Calibration, logits: Mapping[str, FloatArray]
) -> list[dict[str, list[Score]]]:
    """Convert logits [N, C] per head to N mappings from head to scores, highest first.

    Softmax for single-label heads, sigmoid for multi-label ones. Raises EngineFailed if a logit is
    not finite.
    """
    columns = [_score_head(head, calibration, logits[head.name]) for head in heads]
    names = [head.name for head in heads]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def probabilities(kind: HeadType, logits: FloatArray, temperature: float = 1.0) -> FloatArray:
    """Return the probabilities [N, C] of logits [N, C]."""
    scaled = logits / np.float32(temperature)
    if kind is HeadType.MULTI_LABEL:
        # Computed with tanh, because exp(-x) overflows for very negative logits.
        sigmoid: FloatArray = 0.5 * (1.0 + np.tanh(0.5 * scaled))
        return sigmoid
    exponent = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    softmax: FloatArray = exponent / exponent.sum(axis=-1, keepdims=True)
    return softmax


def _score_head(head: Head, calibration: Calibration, logits: FloatArray) -> list[list[Score]]:
    if not np.isfinite(logits).all():
        raise EngineFailed(
            f"The engine returned logits for head {head.name!r} that are not finite."
        )
    probs = probabilities(head.type, logits, calibration.temperature.get(head.name, 1.0))
    order = np.argsort(-logits, axis=-1, kind="stable")
    rows = zip(order.tolist(), probs.tolist(), logits.tolist(), strict=True)
    if head.type is HeadType.SINGLE_LABEL:
        return [
            [Score(head.labels[label], prob[label], logit[label]) for label in labels]
            for labels, prob, logit in rows
        ]
    fitted = calibration.thresholds.get(head.name, {})
    thresholds = [fitted.get(label, 0.5) for label in head.labels]
    return [
        [
            Score(head.labels[label], prob[label], logit[label], prob[label] > thresholds[label])
            for label in labels
        ]
        for labels, prob, logit in rows
    ]
