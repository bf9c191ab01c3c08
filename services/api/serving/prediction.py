"""What a student says about one text, and how its logits become scores.

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

    `predicted` says whether a multi-label head answers the label; a single-label one, its first.
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
    """The answer for one text: the scores of each head, the highest first."""

    scores: dict[str, list[Score]]
    tokens: int
    truncated: bool
    model: str
    version: str
    timing: Timing


@dataclass(frozen=True)
class Calibration:
    """What was fitted on held-out texts after training; nothing where it was not."""

    temperature: Mapping[str, float] = field(default_factory=dict)  # head -> divisor of the logits
    # head -> label -> the probability above which a multi-label head answers it; 0.5 without
    thresholds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def read_scores(
    heads: Sequence[Head], calibration: Calibration, logits: Mapping[str, FloatArray]
) -> list[dict[str, list[Score]]]:
    """Turn logits [N, C] per head into N mappings from head to scores, the highest first.

    Softmax for single-label heads, sigmoid for multi-label ones. Raises EngineFailed where a logit
    is not a finite number.
    """
    columns = [_read_head(head, calibration, logits[head.name]) for head in heads]
    names = [head.name for head in heads]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def probabilities(kind: HeadType, logits: FloatArray, temperature: float = 1.0) -> FloatArray:
    """Return the probabilities [N, C] of logits [N, C]."""
    scaled = logits / np.float32(temperature)
    if kind is HeadType.MULTI_LABEL:
        # Through tanh, because exp(-x) overflows for very negative logits.
        sigmoid: FloatArray = 0.5 * (1.0 + np.tanh(0.5 * scaled))
        return sigmoid
    exponent = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    softmax: FloatArray = exponent / exponent.sum(axis=-1, keepdims=True)
    return softmax


def _read_head(head: Head, calibration: Calibration, logits: FloatArray) -> list[list[Score]]:
    if not np.isfinite(logits).all():
        raise EngineFailed(f"The head {head.name!r} answered with logits that are not finite.")
    chances = probabilities(head.type, logits, calibration.temperature.get(head.name, 1.0))
    order = np.argsort(-logits, axis=-1, kind="stable")
    rows = zip(order.tolist(), chances.tolist(), logits.tolist(), strict=True)
    if head.type is HeadType.SINGLE_LABEL:
        return [
            [Score(head.labels[label], chance[label], logit[label]) for label in labels]
            for labels, chance, logit in rows
        ]
    fitted = calibration.thresholds.get(head.name, {})
    least = [fitted.get(label, 0.5) for label in head.labels]
    return [
        [
            Score(head.labels[label], chance[label], logit[label], chance[label] > least[label])
            for label in labels
        ]
        for labels, chance, logit in rows
    ]
