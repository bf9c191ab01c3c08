"""The steps of a training run: how many there are, and after which ones the model is evaluated."""

from __future__ import annotations

from dataclasses import dataclass

from services.shared.jobs.spec import Training


@dataclass(frozen=True)
class Schedule:
    """The number of optimizer steps of a run and the steps between evaluations."""

    steps_per_epoch: int
    total_steps: int
    evaluation_interval: int

    def evaluates_after(self, step: int) -> bool:
        """Return whether the model is evaluated after `step` steps."""
        return step % self.evaluation_interval == 0 or step == self.total_steps


def plan_schedule(training: Training, *, num_texts: int) -> Schedule:
    """Return the schedule of a run; epochs and evaluation intervals are rounded to whole steps."""
    steps_per_epoch = -(-num_texts // training.batch_size)
    total_steps = max(1, round(training.epochs * steps_per_epoch))
    return Schedule(
        steps_per_epoch=steps_per_epoch,
        total_steps=min(total_steps, training.max_steps or total_steps),
        evaluation_interval=max(1, round(training.eval_every_epochs * steps_per_epoch)),
    )
