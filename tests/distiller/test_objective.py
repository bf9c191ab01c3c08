from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from services.distiller.corpus import Corpus
from services.distiller.objective import Objective, build_objective, matched_layers
from services.shared.datasets.card import Head
from services.shared.jobs.spec import Distillation, Training
from services.shared.model.batches import Step
from services.shared.model.classifier import TAPPED
from services.shared.model.tokens import Batch, Rows

MOOD = Head(name="mood", labels=["bad", "good"])
TONE = Head(name="tone", labels=["dry", "warm"])
FOUR_TEXTS = Step((((0, 1), (2,)), ((3,), ())))
LN3 = math.log(3.0)


def make_objective(**options: Any) -> Objective:
    return Objective(
        heads=[MOOD],
        distillation=Distillation(temperature=1.0, **options),
        head_weights={"mood": 1.0},
        labelled_shares={"mood": 0.5},
        class_weights=None,
    )


def batch(labels: list[int]) -> Batch:
    size = len(labels)
    ids = torch.zeros(size, 1, dtype=torch.long)
    return Batch(ids, None, None, {"mood": torch.tensor(labels)}, torch.ones(size))


def test_a_micro_batch_gives_its_share_of_the_step_by_hand() -> None:
    objective = make_objective(soft_weight=0.7, hard_weight=0.3)
    student = {"mood": torch.zeros(2, 2)}
    teacher = {"mood": torch.tensor([[0.0, LN3], [0.0, 0.0]])}
    loss = objective.loss(
        student, teacher, batch([1, -100]), objective.factors(FOUR_TEXTS, done=0.0)
    )
    soft = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)  # KL([1/4, 3/4] || [1/2, 1/2])
    # 4 texts in the step, half of all texts labelled: the labels' mean is over 4 * 0.5 texts.
    assert loss.item() == pytest.approx(0.7 * soft / 4 + 0.3 * math.log(2) / 2)


def test_a_step_without_labels_learns_from_the_teacher_alone() -> None:
    objective = make_objective(soft_weight=1.0, hard_weight=1.0)
    logits = torch.tensor([[0.3, -0.2]])
    loss = objective.loss(
        {"mood": logits}, {"mood": logits}, batch([-100]), objective.factors(FOUR_TEXTS, done=0.0)
    )
    assert loss.item() == pytest.approx(0, abs=1e-7)


def test_weights_move_from_first_to_final() -> None:
    objective = make_objective(
        soft_weight=1.0, soft_weight_final=0.0, hard_weight=0.0, hard_weight_final=1
    )
    factors = objective.factors(FOUR_TEXTS, done=0.75)
    assert factors.soft["mood"] == pytest.approx(0.25 / 4)
    assert factors.hard["mood"] == pytest.approx(0.75 / 2)


def test_hidden_states_add_their_own_part() -> None:
    objective = make_objective(
        soft_weight=1.0, hard_weight=0.0, hidden_weight=2.0, hidden_loss="mse"
    )
    logits = {"mood": torch.zeros(1, 2)}
    student = logits | {TAPPED: torch.ones(1, 1, 3)}
    teacher = logits | {TAPPED: torch.zeros(1, 1, 3)}
    loss = objective.loss(student, teacher, batch([0]), objective.factors(FOUR_TEXTS, done=0.0))
    assert loss.item() == pytest.approx(2.0 / 4)


LABELS = {"mood": np.array([0, 0, 0, 1]), "tone": np.array([-100, -100, -100, -100])}
TRAIN = Corpus(Rows(["a", "b", "c", "d"], np.arange(1, 5), LABELS), ())


def planned_objective(distillation: Distillation, **training: Any) -> Objective:
    return build_objective(
        [MOOD, TONE], TRAIN, distillation, Training(**training), device=torch.device("cpu")
    )


def test_head_weights_are_shares_of_one() -> None:
    found = planned_objective(Distillation(head_weights={"mood": 3.0}))
    assert found.head_weights == {"mood": 0.75, "tone": 0.25}


def test_a_head_without_any_label_learns_from_the_teacher_alone() -> None:
    factors = planned_objective(Distillation()).factors(FOUR_TEXTS, done=0.0)
    assert factors.hard["tone"] == 0
    assert factors.soft["tone"] > 0


def test_classes_are_balanced_only_where_asked() -> None:
    assert planned_objective(Distillation()).class_weights is None
    weights = planned_objective(Distillation(), class_weights="balanced").class_weights
    assert weights is not None
    assert weights["mood"].tolist() == pytest.approx([4 / 6, 2.0])


def test_no_head_of_weight_above_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="every head has weight 0"):
        planned_objective(Distillation(head_weights={"mood": 0.0, "tone": 0.0}))


def test_layers_are_matched_only_where_hidden_states_count() -> None:
    assert matched_layers(Distillation(), student_layers=2, teacher_layers=4) == []
    later = Distillation(hidden_weight_final=0.5, hidden_layers="spread")
    assert matched_layers(later, student_layers=2, teacher_layers=4) == [(1, 2), (2, 4)]


def test_a_teacher_whose_states_cannot_be_tapped_is_refused() -> None:
    with pytest.raises(
        ValueError, match="hidden_weight: the hidden states of a plain Hugging Face encoder"
    ):
        matched_layers(Distillation(hidden_weight=1.0), student_layers=2, teacher_layers=None)
