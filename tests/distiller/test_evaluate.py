from __future__ import annotations

from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from services.distiller.evaluate import agreement, compare, single_text_seconds
from services.shared.datasets.card import Head, HeadType
from services.shared.model.calibration import Calibration, calibrate

MOOD = Head(name="mood", labels=["bad", "good"])
TAGS = Head(name="tags", type=HeadType.MULTI_LABEL, labels=["x", "y"])
RIGHT, WRONG = np.array([[2.0, 0.0], [0.0, 2.0]]), np.array([[2.0, 0.0], [2.0, 0.0]])
LABELS = {"mood": np.array([0, 1])}


def test_agreement_counts_equal_predictions_labelled_or_not() -> None:
    assert agreement(np.array([0, 1]), np.array([0, 0])) == 0.5
    one, other = np.array([[True, True], [False, True]]), np.array([[True, False], [False, True]])
    assert agreement(one, other) == 0.5


def test_each_model_predicts_with_its_own_thresholds() -> None:
    labels = {"tags": np.array([[1.0, 0.0], [0.0, 1.0]])}
    low = np.array([[-1.0, -3.0], [-3.0, -1.0]])  # right above -2, never above 0
    found = compare(
        [TAGS],
        student={"tags": low},
        teacher={"tags": low + 2},  # right above 0, always above -2
        labels=labels,
        calibration={"tags": Calibration(thresholds={"x": 0.12, "y": 0.12})},
        teacher_calibration={"tags": Calibration(thresholds={"x": 0.5, "y": 0.5})},
    )
    ours, theirs = found["heads"]["tags"], found["teacher"]["heads"]["tags"]
    assert (ours["accuracy"], theirs["accuracy"], ours["agreement"]) == (1.0, 1.0, 1.0)
    assert ours["thresholds"] == {"x": 0.12, "y": 0.12}
    assert theirs["thresholds"] == {"x": 0.5, "y": 0.5}


def test_a_student_is_compared_head_by_head() -> None:
    found = compare(
        [MOOD],
        student={"mood": WRONG},
        teacher={"mood": RIGHT},
        labels=LABELS,
        calibration=calibrate([MOOD], {"mood": RIGHT}, LABELS),
        teacher_calibration={},
    )
    assert found["heads"]["mood"]["accuracy"] == 0.5
    assert found["teacher"]["heads"]["mood"]["accuracy"] == 1.0
    assert found["student_over_teacher"]["mood"] == pytest.approx(1 / 3)
    assert found["heads"]["mood"]["agreement"] == 0.5


def test_a_teacher_with_zero_macro_f1_gives_no_share() -> None:
    found = compare(
        [MOOD],
        student={"mood": RIGHT},
        teacher={"mood": RIGHT[::-1]},
        labels=LABELS,
        calibration={},
        teacher_calibration={},
    )
    assert found["student_over_teacher"]["mood"] is None
    assert "temperature" not in found["heads"]["mood"]


def test_the_latency_is_that_of_single_texts() -> None:
    shapes = []

    class Words:
        pad_token_id = 0

        def __call__(self, texts: list[str], **_options: object) -> dict[str, list[list[int]]]:
            return {"input_ids": [[1] * len(text.split()) for text in texts]}

    def classify(ids: Tensor, mask: Tensor | None, types: Tensor | None) -> dict[str, Tensor]:
        shapes.append(tuple(ids.shape))
        return {"mood": torch.zeros(len(ids), 2)}

    tokenizer = cast("PreTrainedTokenizerBase", Words())
    texts = ["one", "two words", "three more words"]
    seconds = single_text_seconds(
        classify, tokenizer, texts, max_length=8, prefix="", device=torch.device("cpu")
    )
    assert seconds is not None
    assert shapes == [(1, 1), (1, 1), (1, 1), (1, 1), (1, 2), (1, 3)]
    assert (
        single_text_seconds(
            classify, tokenizer, [], max_length=8, prefix="", device=torch.device("cpu")
        )
        is None
    )
