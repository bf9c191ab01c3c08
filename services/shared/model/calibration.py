"""Whether probabilities mean what they say, and what makes them: a temperature, and thresholds.

Legend: N texts, C classes. Temperature scaling: Guo et al. 2017, "On Calibration of Modern Neural
Networks"; the expected calibration error is theirs too (section 2, equation 3).
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
# A head outside these is not miscalibrated but untrained.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.05, 20.0
# With fewer texts that carry a label, or that do not, the best threshold on them is chance.
MIN_EXAMPLES = 10
# Thresholds stay within sigmoid(-7) and sigmoid(7), 0.001 and 0.999: further out rounding decides.
_MAX_CUT = 7.0
Threshold = Annotated[float, Field(gt=0, lt=1)]
_GOLDEN = (math.sqrt(5) - 1) / 2


class Calibration(BaseModel):
    """What was fitted on held-out texts for one head.

    Probabilities are softmax or sigmoid of logits / temperature. A multi-label head answers a label
    whose probability is above the label's threshold, 0.5 where none was fitted.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    temperature: float = 1.0
    thresholds: dict[str, Threshold] = {}  # by label; multi-label heads only

    def logit_thresholds(self, head: Head) -> Array | None:
        """Return the thresholds as logits [C]; None for a head that has none."""
        if not self.thresholds:
            return None
        chances = np.array([self.thresholds.get(label, 0.5) for label in head.labels])
        return np.asarray(self.temperature * np.log(chances / (1 - chances)))


def calibrate(
    heads: Sequence[Head], logits: Mapping[str, Array], labels: Mapping[str, Array]
) -> dict[str, Calibration]:
    """Return what fits the labels of held-out texts, by head; logits are [N, C]."""
    found = {}
    for head in heads:
        scores, truth = logits[head.name], labels[head.name]
        temperature = fit_temperature(head, scores, truth)
        thresholds = fit_thresholds(head, scores / temperature, truth)
        found[head.name] = Calibration(temperature=temperature, thresholds=thresholds)
    return found


def fit_thresholds(head: Head, logits: Array, labels: Array) -> dict[str, float]:
    """Return the probability above which each label's F1 is highest; {} for a single-label head.

    `logits` [N, C] are those after the temperature; `labels` [N, C] with NaN. A threshold lies
    half-way between the logits of two texts, at 0.5 where that is between them. Of several that are
    equally good the one nearest to 0.5 is taken. One that would answer all texts alike is no
    candidate: on a head that has learnt nothing, "always" has the highest F1 (Lipton, Elkan and
    Naryanaswamy 2014, "Optimal Thresholding of Classifiers to Maximize F1 Measure", section 4). A
    label that fewer than MIN_EXAMPLES texts carry, or lack, keeps 0.5.
    """
    if head.type is not HeadType.MULTI_LABEL:
        return {}
    keep = labelled_mask(head, labels)
    scores, truth = logits[keep].astype(np.float64), labels[keep] > 0.5
    return {
        label: 1 / (1 + math.exp(-_best_cut(scores[:, c], truth[:, c])))
        for c, label in enumerate(head.labels)
    }


def fit_temperature(head: Head, logits: Array, labels: Array) -> float:
    """Return the temperature that gives the labels their highest likelihood; 1 without labels.

    `logits` [N, C]; `labels` [N] with -100 or [N, C] with NaN. The likelihood has one maximum in
    1/temperature, so a golden-section search finds it. A label counts as true with probability
    (N + 1) / (N + 2) only (Platt 1999, section 2.2): else a head without a mistake on few texts would
    be made sure beyond all reason.
    """
    keep = labelled_mask(head, labels)
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
    keep = labelled_mask(head, labels)
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


def _best_cut(scores: Array, truth: Array) -> float:
    """Return the logit above which answering yes has the highest F1; `scores`, `truth` [N]."""
    positives = int(truth.sum())
    if min(positives, len(truth) - positives) < MIN_EXAMPLES:
        return 0.0
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], truth[order].cumsum()
    above, below = ranked[:-1], ranked[1:]  # a cut after the n-th text answers yes to n of them
    f1 = 2 * hits[:-1] / (np.arange(1, len(ranked)) + positives)
    cuts = np.where((above > 0) & (below <= 0), 0.0, (above + below) / 2)
    allowed = (above > below) & (np.abs(cuts) <= _MAX_CUT)
    if not allowed.any():
        return 0.0
    best = cuts[allowed & (f1 == f1[allowed].max())]
    return float(best[np.abs(best).argmin()])


def _loss(head: Head, logits: Array, labels: Array, doubt: float) -> float:
    if head.type is HeadType.MULTI_LABEL:
        soft = labels + doubt * (1 - 2 * labels)
        return float((np.logaddexp(0, logits) - soft * logits).mean())
    chosen = np.take_along_axis(logits, labels.astype(np.int64)[:, None], axis=1)[:, 0]
    others = (logits.sum(axis=1) - chosen) / max(1, logits.shape[1] - 1)
    return float((_log_sum(logits) - (1 - doubt) * chosen - doubt * others).mean())


def _log_sum(logits: Array) -> Array:
    return np.asarray(np.logaddexp.reduce(logits, axis=1))
