"""Bootstrap intervals and McNemar's test."""

import numpy as np
import pytest

from services.shared.datasets.card import Head, HeadType
from services.shared.model.bootstrap import (
    mcnemar,
    percentile_interval,
    proportion_interval,
    resample,
)
from services.shared.model.metrics import Array, head_metrics

HEAD = Head(name="mood", labels=["bad", "good", "other"])


def guesses(size: int, *, accuracy: float, classes: int = 3, seed: int = 0) -> tuple[Array, Array]:
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, size)
    wrong = generator.random(size) >= accuracy
    return labels, np.where(wrong, (labels + 1) % classes, labels)


def test_the_interval_contains_the_measured_value_and_narrows_with_more_texts() -> None:
    widths = []
    for size in (100, 10_000):
        labels, predicted = guesses(size, accuracy=0.8)
        found = resample(HEAD, predictions={"model": predicted}, labels=labels, seed=1)["model"]
        measured = head_metrics(HEAD, predicted=predicted, labels=labels)
        for values, value in (
            (found.accuracy, measured.accuracy),
            (found.macro_f1, measured.macro_f1),
        ):
            interval = percentile_interval(values, confidence=0.95)
            assert interval["low"] < value < interval["high"]
        widths.append(interval["high"] - interval["low"])
    assert widths[1] == pytest.approx(widths[0] / 10, rel=0.2)


def test_intervals_are_as_wide_as_the_binomial_distribution_says() -> None:
    labels, predicted = guesses(1000, accuracy=0.8)
    found = resample(HEAD, predictions={"model": predicted}, labels=labels, seed=1)["model"]
    interval = percentile_interval(found.accuracy, confidence=0.95)
    assert interval["high"] - interval["low"] == pytest.approx(
        2 * 1.96 * np.sqrt(0.8 * 0.2 / 1000), rel=0.1
    )
    other = proportion_interval(0.8, size=1000, seed=0, confidence=0.95)
    assert other == pytest.approx(interval, abs=0.01)


def test_the_same_texts_are_drawn_for_every_model() -> None:
    labels, predicted = guesses(500, accuracy=0.8)
    found = resample(
        HEAD, predictions={"one": predicted, "other": predicted}, labels=labels, seed=1
    )
    assert (found["one"].macro_f1 == found["other"].macro_f1).all()


def test_a_multi_label_head_of_one_positive_each_has_the_macro_f1_of_a_single_label_head() -> None:
    labels, predicted = guesses(300, accuracy=0.7)
    single = resample(HEAD, predictions={"model": predicted}, labels=labels, seed=1)["model"]
    multi = resample(
        HEAD.model_copy(update={"type": HeadType.MULTI_LABEL}),
        predictions={"model": np.eye(3)[predicted] > 0.5},
        labels=np.eye(3, dtype=np.float32)[labels],
        seed=1,
    )["model"]
    assert single.macro_f1 == pytest.approx(multi.macro_f1)
    assert single.accuracy == pytest.approx(multi.accuracy)


def test_rare_classes_do_not_bias_the_interval() -> None:
    head = HEAD.model_copy(update={"labels": [str(i) for i in range(1000)]})
    labels, predicted = guesses(2000, accuracy=0.8, classes=1000)
    found = resample(head, predictions={"model": predicted}, labels=labels, seed=1)["model"]
    measured = head_metrics(head, predicted=predicted, labels=labels).macro_f1
    assert found.macro_f1.mean() == pytest.approx(measured, abs=1e-6)


@pytest.mark.parametrize(
    ("only_one", "only_other", "expected"),
    # scipy.stats.binomtest(only_one, only_one + only_other).pvalue, SciPy 1.17
    [(0, 0, 1.0), (5, 5, 1.0), (10, 2, 0.03857421875), (40, 20, 0.01348929373119186)],
)
def test_mcnemar_is_the_exact_binomial_test(
    only_one: int, only_other: int, expected: float
) -> None:
    one = np.array([True] * only_one + [False] * only_other + [True] * 50)
    other = np.array([False] * only_one + [True] * only_other + [True] * 50)
    assert mcnemar(one, other) == pytest.approx(expected)
