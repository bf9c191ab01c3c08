"""Baselines, intervals and paired comparisons in an evaluation, and the file of predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from services.distiller.evaluate import compare
from services.shared.datasets.card import Head, HeadType
from services.shared.model.baseline import Baseline
from services.shared.model.comparison import HeldOut, add_comparisons
from services.shared.model.metrics import Array
from services.shared.model.predictions_file import write_predictions

MOOD = Head(name="mood", labels=["bad", "good"])
TOPICS = Head(name="topics", type=HeadType.MULTI_LABEL, labels=["a", "b"])
SIZE = 400
LABELS = {
    "mood": np.where(np.arange(SIZE) % 50 == 0, -100, np.arange(SIZE) % 2).astype(np.int32),
    "topics": np.eye(2, dtype=np.float32)[np.arange(SIZE) % 2],
}


def _mood(accuracy: float, seed: int) -> Array:
    right = np.random.default_rng(seed).random(SIZE) < accuracy
    return np.where(right, np.arange(SIZE) % 2, 1 - np.arange(SIZE) % 2)


def held_out(*, baseline: float = 0.7) -> HeldOut:
    topics = np.eye(2)[np.arange(SIZE) % 2] > 0.5
    return HeldOut(
        heads=[MOOD, TOPICS],
        labels=LABELS,
        model={"mood": _mood(0.85, 1), "topics": topics},
        teacher={"mood": _mood(0.9, 2), "topics": topics},
        baselines={"mood": Baseline(_mood(baseline, 3), training_texts=20)},
    )


def evaluated(given: HeldOut) -> dict[str, Any]:
    def logits(predicted: Array) -> Array:
        return predicted * 2.0 - 1 if predicted.ndim == 2 else np.eye(2)[predicted]

    evaluation: dict[str, Any] = dict(
        compare(
            given.heads,
            student={name: logits(values) for name, values in given.model.items()},
            teacher={name: logits(values) for name, values in given.teacher.items()},
            labels=given.labels,
            calibration={},
            teacher_calibration={},
        )
    )
    add_comparisons(evaluation, given, seed=0, confidence=0.9)
    return evaluation


def test_every_figure_has_an_interval_around_it() -> None:
    evaluation = evaluated(held_out())
    assert evaluation["confidence"] == 0.9
    mood, teacher = evaluation["heads"]["mood"], evaluation["teacher"]["heads"]["mood"]
    for metrics, name in (
        *((metrics, name) for metrics in (mood, teacher) for name in ("accuracy", "macro_f1")),
        (mood["baseline"], "macro_f1"),
        (mood, "agreement"),
        (mood["against_teacher"], "macro_f1_difference"),
        (mood["against_baseline"], "accuracy_difference"),
        (teacher["against_baseline"], "macro_f1_difference"),
    ):
        interval = metrics[f"{name}_interval"]
        assert interval["low"] < metrics[name] < interval["high"]
    json.dumps(evaluation)


def test_paired_figures_are_those_of_the_two_models() -> None:
    mood = evaluated(held_out())["heads"]["mood"]
    paired = mood["against_baseline"]
    assert paired["macro_f1_difference"] == mood["macro_f1"] - mood["baseline"]["macro_f1"]
    texts = paired["only_model_correct"] - paired["only_other_correct"]
    assert texts == pytest.approx(paired["accuracy_difference"] * mood["texts"])
    assert paired["mcnemar_p"] < 0.001
    share = evaluated(held_out())["student_over_teacher"]["mood"]
    interval = mood["against_teacher"]["macro_f1_share_interval"]
    assert interval["low"] < share < interval["high"]


def test_equal_predictions_differ_by_nothing() -> None:
    topics = evaluated(held_out())["heads"]["topics"]
    assert "baseline" not in topics
    paired = topics["against_teacher"]
    assert paired["macro_f1_difference_interval"] == {"low": 0.0, "high": 0.0}
    assert paired["macro_f1_share_interval"] == {"low": 1.0, "high": 1.0}
    assert paired["mcnemar_p"] == 1.0


def test_a_model_that_is_not_better_than_its_baseline_is_warned_of() -> None:
    assert evaluated(held_out())["warnings"] == []
    (warning,) = evaluated(held_out(baseline=0.85))["warnings"]
    assert warning.startswith(
        "mood: the student is not better than character n-gram counts by more"
    )
    (warning,) = evaluated(held_out(baseline=1.0))["warnings"]
    assert warning.startswith("mood: the student is worse than character n-gram counts by 0.1")


def test_a_head_without_labels_is_left_as_it_is() -> None:
    given = held_out()
    given.labels["mood"][:] = -100
    try:
        assert "accuracy_interval" not in evaluated(given)["heads"]["mood"]
    finally:
        given.labels["mood"][:] = np.arange(SIZE) % 2


def test_the_predictions_of_all_models_are_written_by_line(tmp_path: Path) -> None:
    given = held_out()
    write_predictions(tmp_path, given, np.arange(SIZE) + 7)
    table = pq.read_table(tmp_path / "predictions.parquet").to_pydict()
    assert table["line"][:2] == [7, 8]
    assert table["mood.baseline"] == given.baselines["mood"].predicted.tolist()
    assert table["mood.model"] == given.model["mood"].tolist()
    assert table["topics.teacher"][:2] == [[0], [1]]
    assert "topics.baseline" not in table
