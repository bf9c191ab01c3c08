"""The state of a training loop between two steps, and how it is saved and restored.

Everything else about a loop follows from its seed and its spec.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TypedDict

from pydantic import BaseModel

from services.shared.jobs.documents import Evaluation
from services.shared.jobs.run_directory import RunDirectory, RunInput
from services.shared.jobs.state import Reason
from services.shared.model.batches import Step
from services.shared.model.tokens import TokenisedSplit
from services.shared.training.checkpoint import checkpoint
from services.shared.training.optim.optimizer import Optimizer
from services.shared.training.process import RunFailed, World
from services.shared.training.sharding.shard import Sharded


class Best(BaseModel):
    """The evaluation whose weights will be exported."""

    step: int
    macro_f1: float
    loss: float
    evaluation: Evaluation


class LoopSummary(TypedDict):
    """What a report contains about the loop, without its evaluation."""

    best_step: int
    best_epoch: float
    stopped_early: bool
    padding_share: float
    real_tokens: int
    epoch_seconds: list[float]


class LoopState(BaseModel):
    """The state of a training loop between two steps."""

    step: int = 0  # finished steps
    evaluated_step: int = 0  # the last one after which the model was evaluated
    best: Best | None = None
    worse_evaluations: int = 0  # since the best one
    real_tokens: int = 0
    padded_tokens: int = 0
    seconds: float = 0.0
    epoch_seconds: list[float] = []
    finished: bool = False  # stopped early

    @property
    def padding_share(self) -> float:
        """Return the share of padded tokens that carried no text so far."""
        return 1 - self.real_tokens / max(1, self.padded_tokens)

    def summary(self, steps_per_epoch: int) -> LoopSummary:
        """Return what a report contains about the loop, without its evaluation."""
        best = self.best.step if self.best else self.step
        return {
            "best_step": best,
            "best_epoch": best / steps_per_epoch,
            "stopped_early": self.finished,
            "padding_share": self.padding_share,
            "real_tokens": self.real_tokens,
            "epoch_seconds": self.epoch_seconds,
        }

    def count_tokens(self, step: Step, split: TokenisedSplit) -> None:
        """Add a step's real and padded tokens; a dummy counts as one padded token."""
        lengths = split.lengths
        for rank in step.micro_batches:
            for rows in rank:
                sizes = lengths[list(rows)]
                self.real_tokens += int(sizes.sum())
                self.padded_tokens += int(sizes.max()) * len(rows) if rows else 1

    def add_step_time(self, epoch: int, seconds: float) -> None:
        """Add a step's time to that of its epoch."""
        self.seconds += seconds
        self.epoch_seconds += [0.0] * (epoch + 1 - len(self.epoch_seconds))
        self.epoch_seconds[epoch] += seconds

    def record_evaluation(self, found: Evaluation) -> bool:
        """Record an evaluation; return whether it is the best so far, by macro-F1, then by loss."""
        self.evaluated_step = self.step
        key = (found["macro_f1"], -found["loss"])
        if self.best is not None and key <= (self.best.macro_f1, -self.best.loss):
            self.worse_evaluations += 1
            return False
        self.worse_evaluations = 0
        self.best = Best(
            step=self.step, macro_f1=found["macro_f1"], loss=found["loss"], evaluation=found
        )
        return True


def resume(run: RunDirectory, task: RunInput, sharded: Sharded, optimizer: Optimizer) -> LoopState:
    """Restore the latest checkpoint of this or an earlier attempt; return a new state without one."""
    path = checkpoint.latest(run.checkpoints, task.resume_dir)
    if path is None:
        return LoopState()
    saved = checkpoint.restore(path, sharded, optimizer)
    return LoopState.model_validate(saved.loop)


def save(
    run: RunDirectory,
    task: RunInput,
    sharded: Sharded,
    optimizer: Optimizer,
    world: World,
    state: LoopState,
) -> None:
    """Save a checkpoint to resume from, then remove the oldest."""
    checkpoint.save(
        run.checkpoints,
        sharded,
        optimizer,
        world,
        job_id=task.job_id,
        step=state.step,
        loop=state.model_dump(),
    )
    checkpoint.retain(run.checkpoints, task.spec.training.keep_checkpoints, world)
    _remove_stale_best(run, world, state)


def save_best(
    run: RunDirectory, task: RunInput, sharded: Sharded, world: World, state: LoopState
) -> None:
    """Save the weights of the best evaluation separately."""
    checkpoint.save(
        run.checkpoints,
        sharded,
        None,
        world,
        job_id=task.job_id,
        step=state.step,
        loop={},
        name=_best_name(state.step),
    )
    _remove_stale_best(run, world, state)


def restore_best(run: RunDirectory, task: RunInput, sharded: Sharded, state: LoopState) -> None:
    """Restore the weights of the best evaluation. Raises RunFailed(BAD_CHECKPOINT)."""
    if state.best is None or state.best.step == state.step:
        return
    directories = [run.checkpoints, *([task.resume_dir] if task.resume_dir else [])]
    for directory in directories:
        path: Path = directory / _best_name(state.best.step)
        if (path / checkpoint.COMPLETE).exists():
            checkpoint.restore(path, sharded, None)
            return
    raise RunFailed(
        Reason.BAD_CHECKPOINT,
        f"the best weights (step {state.best.step}) are no longer in {directories[-1]}",
    )


def _remove_stale_best(run: RunDirectory, world: World, state: LoopState) -> None:
    """Remove the best weights that neither the loop nor a checkpoint refers to any more."""
    if not world.is_first:
        return
    loops = [
        checkpoint.read_manifest(p).loop for p in checkpoint.complete_checkpoints(run.checkpoints)
    ]
    states = [state, *(LoopState.model_validate(loop) for loop in loops)]
    kept = {_best_name(s.best.step) for s in states if s.best is not None}
    for path in run.checkpoints.glob("best-*"):
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _best_name(step: int) -> str:
    return f"best-{step:08d}"
