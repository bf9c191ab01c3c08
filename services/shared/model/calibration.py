"""Calibration of a head: a temperature for its probabilities, and thresholds for its predictions.

Legend: N texts, C classes. Temperature scaling: Guo et al. 2017, "On Calibration of Modern Neural
Networks"; they also define the expected calibration error (section 2, equation 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from services.shared.datasets.card import Head, HeadType
from services.shared.model.metrics import Array, labelled_mask

NUM_BINS = 15  # as in Guo et al. 2017
# A fitted temperature outside these bounds means an untrained head, not a miscalibrated one.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
# With fewer positive or fewer negative texts, the best threshold is a matter of chance.
MIN_EXAMPLES = 10
# Thresholds stay between sigmoid(-7) and sigmoid(7), 0.001 and 0.999: beyond, rounding decides.
_MAX_LOGIT_THRESHOLD = 7.0
Threshold = Annotated[float, Field(gt=0, lt=1)]
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


class Calibration(BaseModel):
    """The calibration of one head, fitted on held-out texts.

    Probabilities are softmax or sigmoid of logits / temperature. A multi-label head predicts a label
    whose probability is above the label's threshold, 0.5 where none was fitted.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    temperature: float = 1.0
    thresholds: dict[str, Threshold] = {}  # by label; multi-label heads only

    def logit_thresholds(self, head: Head) -> Array | None:
        """Return the thresholds as logits [C]; None for a head that has none."""
        if not self.thresholds:
            return None
        probabilities = np.array([self.thresholds.get(label, 0.5) for label in head.labels])
        return np.asarray(self.temperature * np.log(probabilities / (1 - probabilities)))


def calibrate(
    heads: Sequence[Head], logits: Mapping[str, Array], labels: Mapping[str, Array]
) -> dict[str, Calibration]:
    """Return the calibration of each head, fitted on held-out texts; logits are [N, C]."""
    calibrations = {}
    for head in heads:
        scores, truth = logits[head.name], labels[head.name]
        temperature = fit_temperature(head, scores, truth)
        thresholds = fit_thresholds(head, scores / temperature, truth)
        calibrations[head.name] = Calibration(temperature=temperature, thresholds=thresholds)
    return calibrations


def fit_thresholds(head: Head, logits: Array, labels: Array) -> dict[str, float]:
    """Return the threshold that maximises each label's F1; {} for a single-label head.

    `logits` [N, C] are divided by the temperature already; `labels` [N, C] with NaN. A threshold is
    half-way between the logits of two texts, or 0.5 where that is between them. Of equally good
    thresholds the one nearest to 0.5 is taken. A threshold that gives all texts the same prediction
    is no candidate: for an uninformative head, always predicting the label has the highest F1
    (Lipton, Elkan and Naryanaswamy 2014, "Optimal Thresholding of Classifiers to Maximize F1
    Measure", section 4). A label with fewer than MIN_EXAMPLES positive or negative texts keeps 0.5.
    """
    if head.type is not HeadType.MULTI_LABEL:
        return {}
    keep = labelled_mask(head, labels)
    scores, truth = logits[keep].astype(np.float64), labels[keep] > 0.5
    return {
        label: 1 / (1 + math.exp(-_best_logit_threshold(scores[:, c], truth[:, c])))
        for c, label in enumerate(head.labels)
    }


def fit_temperature(head: Head, logits: Array, labels: Array) -> float:
    """Return the temperature that maximises the likelihood of the labels; 1 without labels.

    `logits` [N, C]; `labels` [N] with -100 or [N, C] with NaN. The likelihood has one maximum in
    1/temperature, so a golden-section search finds it. A label counts as true with probability
    (N + 1) / (N + 2) only (Platt 1999, section 2.2): otherwise a head without
    a mistake on few texts would become overconfident.
    """
    keep = labelled_mask(head, labels)
    if not keep.any():
        return 1.0
    chosen, truth = logits[keep].astype(np.float64), labels[keep]
    smoothing = 1 / (len(truth) + 2)
    low, high = 1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE
    while high - low > 1e-4 * low:
        one, other = high - _GOLDEN_RATIO * (high - low), low + _GOLDEN_RATIO * (high - low)
        if _loss(head, chosen * one, truth, smoothing) <= _loss(
            head, chosen * other, truth, smoothing
        ):
            high = other
        else:
            low = one
    return 2 / (low + high)


def calibration_error(head: Head, logits: Array, labels: Array, *, temperature: float) -> float:
    """Return the expected calibration error in [0, 1]: |confidence - accuracy| over equal-width bins.

    A single-label prediction has one confidence, its probability; a multi-label head has one per
    class, that of the predicted value. Texts without labels are ignored.
    """
    keep = labelled_mask(head, labels)
    scaled, truth = logits[keep].astype(np.float64) / temperature, labels[keep]
    if not len(scaled):
        return 0.0
    if head.type is HeadType.MULTI_LABEL:
        confidence = (1 / (1 + np.exp(-np.abs(scaled)))).reshape(-1)
        correct = ((scaled > 0) == (truth > 0.5)).reshape(-1)
    else:
        confidence = np.exp(scaled.max(axis=1) - _log_sum(scaled))
        correct = scaled.argmax(axis=1) == truth
    bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = np.bincount(bins, weights=confidence - correct, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(confidence))


def _best_logit_threshold(scores: Array, truth: Array) -> float:
    """Return the logit threshold with the highest F1; `scores`, `truth` [N]."""
    positives = int(truth.sum())
    if min(positives, len(truth) - positives) < MIN_EXAMPLES:
        return 0.0
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], truth[order].cumsum()
    above, below = ranked[:-1], ranked[1:]  # a threshold after the n-th text predicts n positives
    f1 = 2 * hits[:-1] / (np.arange(1, len(ranked)) + positives)
    thresholds = np.where((above > 0) & (below <= 0), 0.0, (above + below) / 2)
    allowed = (above > below) & (np.abs(thresholds) <= _MAX_LOGIT_THRESHOLD)
    if not allowed.any():
        return 0.0
    best = thresholds[allowed & (f1 == f1[allowed].max())]
    return float(best[np.abs(best).argmin()])


def _loss(head: Head, logits: Array, labels: Array, smoothing: float) -> float:
    if head.type is HeadType.MULTI_LABEL:
        soft = labels + smoothing * (1 - 2 * labels)
        return float((np.logaddexp(0, logits) - soft * logits).mean())
    chosen = np.take_along_axis(logits, labels.astype(np.int64)[:, None], axis=1)[:, 0]
    others = (logits.sum(axis=1) - chosen) / max(1, logits.shape[1] - 1)
    return float((_log_sum(logits) - (1 - smoothing) * chosen - smoothing * others).mean())


def _log_sum(logits: Array) -> Array:
    return np.asarray(np.logaddexp.reduce(logits, axis=1))
