from __future__ import annotations

import numpy as np
import pytest

from services.distiller.calibration import calibration_error, fit_temperature
from services.shared.datasets.card import Head, HeadType

MOOD = Head(name="mood", labels=["bad", "good"])
TAGS = Head(name="tags", type=HeadType.MULTI_LABEL, labels=["x", "y"])


def draw(scale: float) -> tuple[np.ndarray, np.ndarray]:
    """Return logits that are `scale` times too sure of themselves, and labels."""
    generator = np.random.default_rng(0)
    honest = generator.normal(0, 2, size=(20_000, 2))
    share = 1 / (1 + np.exp(honest[:, 0] - honest[:, 1]))
    labels = (generator.random(20_000) < share).astype(np.int32)
    return (scale * honest).astype(np.float32), labels


@pytest.mark.parametrize("scale", [0.5, 1.0, 3.0])
def test_the_fitted_temperature_undoes_overconfidence(scale):
    logits, labels = draw(scale)
    assert fit_temperature(MOOD, logits, labels) == pytest.approx(scale, rel=0.05)


def test_calibration_lowers_the_error_of_an_overconfident_head():
    logits, labels = draw(3.0)
    before = calibration_error(MOOD, logits, labels, temperature=1.0)
    after = calibration_error(MOOD, logits, labels, temperature=3.0)
    assert before > 0.08
    assert after < 0.01


def test_the_error_by_hand():
    # Three answers of confidence 3/4 in one bin, one of them right: |3/4 - 1/3|.
    logits = np.tile([0.0, np.log(3.0)], (3, 1))
    found = calibration_error(MOOD, logits, np.array([1, 0, 0]), temperature=1.0)
    assert found == pytest.approx(0.75 - 1 / 3)


def test_a_multi_label_head_is_calibrated_class_by_class():
    logits, labels = draw(1.0)
    margin = (logits[:, 1] - logits[:, 0])[:, None] * 4
    both = np.concatenate([margin, margin], axis=1)
    truth = np.stack([labels, labels], axis=1).astype(np.float32)
    assert fit_temperature(TAGS, both, truth) == pytest.approx(4.0, rel=0.05)
    assert calibration_error(TAGS, both, truth, temperature=4.0) < 0.01


def test_texts_without_labels_do_not_count():
    logits, labels = draw(2.0)
    labels[10_000:] = -100
    logits[10_000:] = 1e6
    assert fit_temperature(MOOD, logits, labels) == pytest.approx(2.0, rel=0.06)


def test_no_labels_leave_the_temperature_at_one():
    nothing = np.zeros((3, 2)), np.full(3, -100)
    assert fit_temperature(MOOD, *nothing) == 1.0
    assert calibration_error(MOOD, *nothing, temperature=1.0) == 0.0


def test_a_head_without_a_mistake_on_few_texts_is_not_made_too_sure():
    logits = np.tile([0.0, 2.0], (40, 1))
    temperature = fit_temperature(MOOD, logits, np.ones(40, dtype=np.int32))
    confidence = 1 / (1 + np.exp(-2 / temperature))
    assert confidence == pytest.approx(41 / 42, abs=1e-3)
