"""Progress that rank 0 reports to the worker: phase, step, speed, time left, evaluations."""

from __future__ import annotations

import time

from services.shared.jobs.documents import Evaluation
from services.shared.jobs.run_directory import ProgressRecord, RunDirectory, append_record
from services.shared.jobs.state import Phase
from services.shared.training.process import Position, World

# The worker copies progress to the database every few seconds; more lines would only fill the disk.
EVERY_SECONDS = 1.0
# Steps differ in length with their texts: the speed is an average over about this many.
SPEED_STEPS = 50

_PLAN_PHASES = {
    Phase.LOADING: "load",
    Phase.WRAPPING: "wrap",
    Phase.TRAINING: "forward",
    Phase.EVALUATING: "evaluation",
    Phase.SAVING: "checkpoint",
    Phase.EXPORTING: "export",
}


class Progress:
    """Appends to progress.jsonl on rank 0; elsewhere only keeps the rank's position."""

    def __init__(self, run: RunDirectory, world: World, position: Position) -> None:
        self._file = run.progress if world.is_first else None
        self._position = position
        self._phase = Phase.LOADING
        self._last_written = 0.0
        self._seconds_per_step: float | None = None
        self._tokens_per_second: float | None = None

    def phase(self, phase: Phase, message: str | None = None, *, step: int | None = None) -> None:
        """Report the next phase, and optionally the last finished step."""
        self._phase = phase
        self._position.phase = _PLAN_PHASES.get(phase, str(phase))
        self._append(ProgressRecord(time=time.time(), phase=phase, message=message, step=step))

    def step(
        self,
        step: int,
        *,
        total: int,
        epoch: float,
        loss: float,
        learning_rate: float,
        tokens: int,
        seconds: float,
        padding_share: float,
    ) -> None:
        """Report a finished step of `tokens` real tokens over all ranks that took `seconds`."""
        self._seconds_per_step = _average(self._seconds_per_step, seconds, step)
        self._tokens_per_second = _average(self._tokens_per_second, tokens / seconds, step)
        now = time.time()
        if now - self._last_written < EVERY_SECONDS and step not in (1, total):
            return
        self._append(
            ProgressRecord(
                time=now,
                phase=self._phase,
                step=step,
                total_steps=total,
                epoch=round(epoch, 4),
                loss=loss,
                learning_rate=learning_rate,
                tokens_per_second=round(self._tokens_per_second, 1),
                eta_seconds=round((total - step) * self._seconds_per_step, 1),
                padding_share=round(padding_share, 4),
            )
        )

    def evaluation(self, metrics: Evaluation, *, step: int, total: int, epoch: float) -> None:
        """Report the metrics of one evaluation."""
        self._append(
            ProgressRecord(
                time=time.time(),
                phase=self._phase,
                step=step,
                total_steps=total,
                epoch=round(epoch, 4),
                evaluation=metrics,
            )
        )

    def _append(self, record: ProgressRecord) -> None:
        if self._file is not None:
            append_record(self._file, record)
            self._last_written = record.time


def _average(old: float | None, new: float, step: int) -> float:
    weight = 1 / min(step, SPEED_STEPS)
    return new if old is None else old + weight * (new - old)
