from __future__ import annotations

import numpy as np
import pytest

from services.shared.datasets.card import Head, HeadType
from services.shared.model.calibration import (
    MIN_EXAMPLES,
    Calibration,
    calibrate,
    calibration_error,
    fit_temperature,
    fit_thresholds,
)
from services.shared.model.metrics import head_metrics, predict

MOOD = Head(name="mood", labels=["bad", "good"])
TAGS = Head(name="tags", type=HeadType.MULTI_LABEL, labels=["x", "y"])


def draw(scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return logits that are overconfident by a factor of `scale`, and labels."""
    generator = np.random.default_rng(0)
    honest = generator.normal(0, 2, size=(20_000, 2))
    share = 1 / (1 + np.exp(honest[:, 0] - honest[:, 1]))
    labels = (generator.random(20_000) < share).astype(np.int32)
    return (scale * honest).astype(np.float32), labels


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_the_fitted_temperature_undoes_overconfidence(scale: float) -> None:
    logits, labels = draw(scale)
    assert fit_temperature(MOOD, logits, labels) == pytest.approx(scale, rel=0.05)


def test_calibration_lowers_the_error_of_an_overconfident_head() -> None:
    logits, labels = draw(3.0)
    before = calibration_error(MOOD, logits, labels, temperature=1.0)
    after = calibration_error(MOOD, logits, labels, temperature=3.0)
    assert before > 0.08
    assert after < 0.01


def test_the_error_by_hand() -> None:
    # Three answers of confidence 3/4 in one bin, one of them right: |3/4 - 1/3|.
    logits = np.tile([0.0, np.log(3.0)], (3, 1))
    found = calibration_error(MOOD, logits, np.array([1, 0, 0]), temperature=1.0)
    assert found == pytest.approx(0.75 - 1 / 3)


def test_a_multi_label_head_is_calibrated_class_by_class() -> None:
    logits, labels = draw(1.0)
    margin = (logits[:, 1] - logits[:, 0])[:, None] * 4
    both = np.concatenate([margin, margin], axis=1)
    truth = np.stack([labels, labels], axis=1).astype(np.float32)
    assert fit_temperature(TAGS, both, truth) == pytest.approx(4.0, rel=0.05)
    assert calibration_error(TAGS, both, truth, temperature=4.0) < 0.01


def test_texts_without_labels_are_ignored() -> None:
    logits, labels = draw(2.0)
    labels[10_000:] = -100
    logits[10_000:] = 1e6
    assert fit_temperature(MOOD, logits, labels) == pytest.approx(2.0, rel=0.06)


def test_no_labels_leave_the_temperature_at_one() -> None:
    nothing = np.zeros((3, 2)), np.full(3, -100)
    assert fit_temperature(MOOD, *nothing) == 1.0
    assert calibration_error(MOOD, *nothing, temperature=1.0) == 0.0


def test_a_head_without_a_mistake_on_few_texts_does_not_become_overconfident() -> None:
    logits = np.tile([0.0, 2.0], (40, 1))
    temperature = fit_temperature(MOOD, logits, np.ones(40, dtype=np.int32))
    confidence = 1 / (1 + np.exp(-2 / temperature))
    assert confidence == pytest.approx(41 / 42, abs=1e-3)


def rare() -> tuple[np.ndarray, np.ndarray]:
    """Return logits [N, 2] and labels: x is carried by few texts, which seldom reach 0; y by half."""
    generator = np.random.default_rng(1)
    labels = np.stack([np.arange(400) % 20 == 0, np.arange(400) % 2 == 0], axis=1)
    centres = np.where(labels, [-1.0, 2.0], [-4.0, -2.0])
    return generator.normal(centres, 1.0), labels.astype(np.float32)


def test_a_fitted_threshold_has_the_highest_f1_of_all() -> None:
    logits, labels = rare()
    thresholds = fit_thresholds(TAGS, logits, labels)
    fitted = Calibration(thresholds=thresholds)
    found = head_metrics(
        TAGS, predicted=predict(TAGS, logits, fitted.logit_thresholds(TAGS)), labels=labels
    ).classes
    for c, label in enumerate(TAGS.labels):
        truth = labels[:, c] > 0.5
        tried = [logits[:, c] >= cut for cut in logits[:, c]]
        best = max(2 * (yes & truth).sum() / (yes.sum() + truth.sum()) for yes in tried)
        assert found[c].f1 == pytest.approx(best), label
    plain = head_metrics(TAGS, predicted=predict(TAGS, logits), labels=labels).classes
    assert thresholds["x"] < 0.3
    assert found[0].f1 > plain[0].f1 + 0.2


def test_of_equally_good_thresholds_the_one_nearest_to_a_half_is_used() -> None:
    truth = np.arange(40) % 2
    apart = np.where(truth, 3.0, -3.0)  # every threshold between is right
    labels = np.stack([truth, 1 - truth], axis=1).astype(np.float32)
    below = np.where(truth, -1.0, -3.0)  # every threshold between is right, and none is 0.5
    logits = np.stack([apart, -apart], axis=1)
    assert fit_thresholds(TAGS, logits, labels) == {"x": 0.5, "y": 0.5}
    half_way = 1 / (1 + np.exp(2.0))
    found = fit_thresholds(TAGS, np.stack([below, -apart], axis=1), labels)
    assert found == {"x": pytest.approx(half_way), "y": 0.5}


@pytest.mark.parametrize("flip", [False, True], ids=["few carry it", "few lack it"])
def test_a_label_with_too_few_examples_keeps_a_half(flip: bool) -> None:
    logits, _ = rare()
    found = []
    for count in (MIN_EXAMPLES - 1, MIN_EXAMPLES):
        rank = np.argsort(np.argsort(-logits[:, 0]))
        truth = (rank < count) ^ flip
        column = -logits[:, 0] if flip else logits[:, 0]
        labels = np.stack([truth, truth], axis=1).astype(np.float32)
        found.append(fit_thresholds(TAGS, np.stack([column - 2, column - 2], axis=1), labels))
    assert found[0] == {"x": 0.5, "y": 0.5}
    assert found[1]["x"] != 0.5


def test_an_uninformative_head_keeps_thresholds_of_a_half() -> None:
    labels = (np.arange(80).reshape(40, 2) % 3 == 0).astype(np.float32)
    assert fit_thresholds(TAGS, np.full((40, 2), -1.0), labels) == {"x": 0.5, "y": 0.5}


def test_thresholds_are_of_calibrated_probabilities_and_leave_out_unlabelled_texts() -> None:
    logits, labels = rare()
    labels[::7], logits[::7] = np.nan, 50.0
    fitted = calibrate([TAGS], {"tags": logits}, {"tags": labels})["tags"]
    assert fitted.temperature != pytest.approx(1.0, abs=0.02)
    chances = 1 / (1 + np.exp(-logits / fitted.temperature))
    above = chances > np.array([fitted.thresholds[label] for label in TAGS.labels])
    assert (predict(TAGS, logits, fitted.logit_thresholds(TAGS)) == above).all()


def test_a_single_label_head_has_no_thresholds() -> None:
    logits, labels = draw(1.0)
    fitted = calibrate([MOOD], {"mood": logits}, {"mood": labels})["mood"]
    assert fitted.thresholds == {}
    assert fitted.logit_thresholds(MOOD) is None


@pytest.mark.parametrize("threshold", [0.0, 1.0, -0.1])
def test_a_threshold_is_a_probability_between_never_and_always(threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        Calibration(thresholds={"x": threshold})
