"""Whether probabilities mean what they say, and the one number per head that makes them.

Legend: N texts, C classes. Temperature scaling: Guo et al. 2017, "On Calibration of Modern Neural
Networks"; the expected calibration error is theirs too (section 2, equation 3).
"""

from __future__ import annotations

import math

import numpy as np

from services.shared.datasets.card import Head, HeadType
from services.shared.model.metrics import Array, labelled

NUM_BINS = 15  # as in Guo et al. 2017
# A head outside these is not miscalibrated but untrained.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
_GOLDEN = (math.sqrt(5) - 1) / 2


def fit_temperature(head: Head, logits: Array, labels: Array) -> float:
    """Return the temperature that gives the labels their highest likelihood; 1 without labels.

    `logits` [N, C]; `labels` [N] with -100 or [N, C] with NaN. The likelihood has one maximum in
    1/temperature, so a golden-section search finds it. A label counts as true with probability
    (N + 1) / (N + 2) only (Platt 1999, section 2.2): else a head without a mistake on few texts would
    be made sure beyond all reason.
    """
    keep = labelled(head, labels)
    if not keep.any():
        return 1.0
    chosen, truth = logits[keep].astype(np.float64), labels[keep]
    doubt = 1 / (len(truth) + 2)
    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    while high - low > 1e-4 * low:
        one, other = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if _loss(head, chosen * one, truth, doubt) <= _loss(head, chosen * other, truth, doubt):
            high = other
        else:
            low = one
    return 2 / (low + high)


def calibration_error(head: Head, logits: Array, labels: Array, *, temperature: float) -> float:
    """Return the expected calibration error in [0, 1]: |confidence - accuracy| over equal-width bins.

    A single-label answer has one confidence, its probability; a multi-label head has one for each
    class, that of the answer given. Texts without labels are left out.
    """
    keep = labelled(head, labels)
    scaled, truth = logits[keep].astype(np.float64) / temperature, labels[keep]
    if not len(scaled):
        return 0.0
    if head.type is HeadType.MULTI_LABEL:
        confidence = (1 / (1 + np.exp(-np.abs(scaled)))).reshape(-1)
        right = ((scaled > 0) == (truth > 0.5)).reshape(-1)
    else:
        confidence = np.exp(scaled.max(axis=1) - _log_sum(scaled))
        right = scaled.argmax(axis=1) == truth
    bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = np.bincount(bins, weights=confidence - right, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def _loss(head: Head, logits: Array, labels: Array, doubt: float) -> float:
    if head.type is HeadType.MULTI_LABEL:
        soft = labels + doubt * (1 - 2 * labels)
        return float((np.logaddexp(0, logits) - soft * logits).mean())
    chosen = np.take_along_axis(logits, labels.astype(np.int64)[:, None], axis=1)[:, 0]
    others = (logits.sum(axis=1) - chosen) / max(1, logits.shape[1] - 1)
    return float((_log_sum(logits) - (1 - doubt) * chosen - doubt * others).mean())


def _log_sum(logits: Array) -> Array:
    return np.asarray(np.logaddexp.reduce(logits, axis=1))
