"""What a distillation minimises: labels, the teacher's answers and its hidden states, head by head.

Legend: B texts of a micro-batch, C classes of a head, K matched layers, H hidden size of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.distiller.corpus import Lesson
from services.distiller.losses import head_weights, hidden_loss, layer_map, soft_loss, weight_at
from services.shared.datasets.card import Head
from services.shared.jobs.spec import Distillation, Training
from services.shared.model.batches import Step
from services.shared.model.classifier import TAPPED
from services.shared.model.objective import balanced_weights, supervised_loss
from services.shared.model.tokens import Batch


@dataclass(frozen=True)
class Factors:
    """What each sum of a micro-batch is multiplied with, to be its share of the step's loss."""

    hard: dict[str, float]  # by head, per labelled text
    soft: dict[str, float]  # by head, per text
    hidden: float  # per text


@dataclass(frozen=True)
class Objective:
    """The loss of a distillation; its weights may change from step to step."""

    heads: Sequence[Head]
    wanted: Distillation
    head_weights: dict[str, float]  # they sum to 1
    labelled_shares: dict[str, float]
    class_weights: dict[str, Tensor] | None

    def factors(self, step: Step, *, done: float) -> Factors:
        """Return the factors of a step when a share `done` of the steps is over.

        A head's labels count as if each step held its average share of labelled texts: dividing by
        the labelled texts of the step itself would give the two labels of a nearly unlabelled batch
        the weight of a whole batch.
        """
        wanted, texts = self.wanted, len(step.rows)
        hard = weight_at(wanted.hard_weight, wanted.hard_weight_final, done=done)
        soft = weight_at(wanted.soft_weight, wanted.soft_weight_final, done=done)
        hidden = weight_at(wanted.hidden_weight, wanted.hidden_weight_final, done=done)
        return Factors(
            hard={
                name: hard * weight / (texts * self.labelled_shares[name])
                if self.labelled_shares[name]
                else 0.0
                for name, weight in self.head_weights.items()
            },
            soft={name: soft * weight / texts for name, weight in self.head_weights.items()},
            hidden=hidden / texts,
        )

    def loss(
        self,
        student: Mapping[str, Tensor],
        teacher: Mapping[str, Tensor],
        batch: Batch,
        factors: Factors,
    ) -> Tensor:
        """Return a micro-batch's share of the step's loss, a scalar.

        `student` and `teacher` hold logits [B, C] by head, and under TAPPED states [B, K, H].
        """
        labels = supervised_loss(student, batch.labels, self.heads, self.class_weights)
        parts = []
        for head in self.heads:
            name = head.name
            soft = soft_loss(
                head,
                student[name],
                teacher[name],
                batch.weight,
                divergence=self.wanted.divergence,
                temperature=self.wanted.temperature,
            )
            parts.append(factors.hard[name] * labels[name].total + factors.soft[name] * soft)
        if TAPPED in student:
            parts.append(
                factors.hidden
                * hidden_loss(
                    student[TAPPED], teacher[TAPPED], batch.weight, kind=self.wanted.hidden_loss
                )
            )
        return torch.stack(parts).sum()


def plan_objective(
    lesson: Lesson, wanted: Distillation, training: Training, *, device: torch.device
) -> Objective:
    """Return the objective of a job. Raises ValueError for weights of unknown or of no heads."""
    weights = head_weights(wanted, [head.name for head in lesson.heads])
    total = sum(weights.values())
    if total == 0:
        raise ValueError("distillation.head_weights: every head has weight 0")
    balanced = None
    if training.class_weights == "balanced":
        found = balanced_weights(lesson.heads, lesson.train.corpus.rows.labels)
        balanced = {name: values.to(device) for name, values in found.items()}
    return Objective(
        heads=lesson.heads,
        wanted=wanted,
        head_weights={name: weight / total for name, weight in weights.items()},
        labelled_shares=lesson.train.corpus.labelled_shares(lesson.heads),
        class_weights=balanced,
    )


def matched_layers(
    wanted: Distillation, *, student_layers: int, teacher_layers: int | None
) -> list[tuple[int, int]]:
    """Return (student layer, teacher layer) pairs whose states are matched; none by default.

    Raises ValueError for a teacher whose states cannot be tapped (None layers).
    """
    if not (wanted.hidden_weight or wanted.hidden_weight_final):
        return []
    if teacher_layers is None:
        raise ValueError(
            "distillation.hidden_weight: the hidden states of an encoder classifier made elsewhere "
            "cannot be matched; set it to 0"
        )
    return layer_map(
        student_layers=student_layers,
        teacher_layers=teacher_layers,
        spread=wanted.hidden_layers == "spread",
    )
