"""The objective of a distillation: labels, the teacher's logits and its hidden states.

Legend: B texts of a micro-batch, C classes of a head, K matched layers, H hidden size of the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.distiller.corpus import Corpus
from services.distiller.losses import (
    head_weights,
    hidden_loss,
    match_layers,
    scheduled_weight,
    soft_loss,
)
from services.shared.datasets.card import Head
from services.shared.jobs.spec import Distillation, Training
from services.shared.model.batches import Step
from services.shared.model.classifier import TAPPED
from services.shared.model.objective import balanced_weights, supervised_loss
from services.shared.model.tokens import Batch


@dataclass(frozen=True)
class LossFactors:
    """Factors that turn the loss sums of a micro-batch into its share of the step's loss."""

    hard: dict[str, float]  # by head, per labelled text
    soft: dict[str, float]  # by head, per text
    hidden: float  # per text


@dataclass(frozen=True)
class Objective:
    """The loss of a distillation, whose weights may follow a schedule."""

    heads: Sequence[Head]
    distillation: Distillation
    head_weights: dict[str, float]  # they sum to 1
    labelled_shares: dict[str, float]
    class_weights: dict[str, Tensor] | None

    def factors(self, step: Step, *, done: float) -> LossFactors:
        """Return the factors of a step after a share `done` of all steps.

        Label losses are normalised as if each step held the average share of labelled texts:
        dividing by the labelled texts of the step itself would give the two labels of a nearly
        unlabelled batch the weight of a whole batch.
        """
        spec, texts = self.distillation, len(step.rows)
        hard = scheduled_weight(spec.hard_weight, spec.hard_weight_final, done=done)
        soft = scheduled_weight(spec.soft_weight, spec.soft_weight_final, done=done)
        hidden = scheduled_weight(spec.hidden_weight, spec.hidden_weight_final, done=done)
        return LossFactors(
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
        factors: LossFactors,
    ) -> Tensor:
        """Return a micro-batch's share of the step's loss, a scalar.

        `student` and `teacher` contain logits [B, C] by head, and states [B, K, H] under TAPPED.
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
                divergence=self.distillation.divergence,
                temperature=self.distillation.temperature,
            )
            parts.append(factors.hard[name] * labels[name].total + factors.soft[name] * soft)
        if TAPPED in student:
            parts.append(
                factors.hidden
                * hidden_loss(
                    student[TAPPED],
                    teacher[TAPPED],
                    batch.weight,
                    kind=self.distillation.hidden_loss,
                )
            )
        return torch.stack(parts).sum()


def build_objective(
    heads: Sequence[Head],
    train: Corpus,
    distillation: Distillation,
    training: Training,
    *,
    device: torch.device,
) -> Objective:
    """Return the objective of a job. Raises ValueError for unknown heads and for weights that are all 0."""
    weights = head_weights(distillation, [head.name for head in heads])
    total = sum(weights.values())
    if total == 0:
        raise ValueError("distillation.head_weights: every head has weight 0")
    balanced = None
    if training.class_weights == "balanced":
        weights_by_head = balanced_weights(heads, train.rows.labels)
        balanced = {name: values.to(device) for name, values in weights_by_head.items()}
    return Objective(
        heads=heads,
        distillation=distillation,
        head_weights={name: weight / total for name, weight in weights.items()},
        labelled_shares=train.labelled_shares(heads),
        class_weights=balanced,
    )


def matched_layers(
    distillation: Distillation, *, student_layers: int, teacher_layers: int | None
) -> list[tuple[int, int]]:
    """Return (student layer, teacher layer) pairs whose states are matched; none by default.

    `teacher_layers` is None for a teacher whose states cannot be tapped; raises ValueError where
    they are needed.
    """
    if not (distillation.hidden_weight or distillation.hidden_weight_final):
        return []
    if teacher_layers is None:
        raise ValueError(
            "distillation.hidden_weight: the hidden states of a plain Hugging Face encoder classifier "
            "cannot be matched; set it to 0"
        )
    return match_layers(
        student_layers=student_layers,
        teacher_layers=teacher_layers,
        spread=distillation.hidden_layers == "spread",
    )
