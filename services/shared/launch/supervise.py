"""One attempt, from the start of its ranks until the last one has ended."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Literal

import structlog

from services.shared.files.atomic_write import shared_partial_path
from services.shared.jobs.run_directory import (
    COMPLETE,
    RunDirectory,
    RunInput,
    StopRequest,
    write_json,
)
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.views import Claim, HeartbeatReply
from services.shared.launch.engines.local import LocalEngine
from services.shared.launch.engines.port import EngineState, Submission
from services.shared.launch.oom_counter import OomCounters
from services.shared.launch.processes import NO_DESCRIPTORS
from services.shared.launch.torchrun import Launch

log = structlog.get_logger(__name__)

StopReason = Literal["cancelled", "handed_back", "timed_out"]

_TICK_SECONDS = 0.2
# torchrun passes SIGTERM to its ranks and kills what is left after 30 s (elastic agent, 2.5 to 2.13).
_TERMINATE_SECONDS = 35.0


class Force(str, Enum):
    """The force that the worker needed to end the ranks."""

    NONE = "none"
    TERMINATED = "terminated"
    KILLED = "killed"

    __str__ = str.__str__


@dataclass(frozen=True)
class RunExit:
    """What the worker knows when no rank is alive; the rest is in the run directory."""

    exit_code: int  # of torchrun, negative for a signal
    stop: StopReason | None = None  # the stop that the worker requested
    force: Force = Force.NONE
    oom_killed: bool | None = None  # whether the kernel counted a kill; None where nothing counts
    seconds: float = 0.0


def prepare(claim: Claim, *, settings: JobSettings) -> RunDirectory:
    """Write the inputs of one attempt into its run directory. Raises OSError."""
    run = RunDirectory(settings.run_dir(claim.job_id, claim.attempt))
    run.path.mkdir(parents=True, exist_ok=True)
    resolved = claim.resolved
    assert resolved is not None, "a claim with a problem is not run"
    if claim.resume_dir is not None:
        link_best_weights(claim.resume_dir, run.checkpoints)
    if claim.plan is not None:
        write_json(run.plan, claim.plan)
    write_json(
        run.spec,
        RunInput(
            job_id=claim.job_id,
            attempt=claim.attempt,
            spec=claim.spec,
            dataset_dir=resolved.dataset_dir,
            unlabelled_dirs=list(resolved.unlabelled_dirs),
            model_dir=resolved.model_dir,
            teacher_dir=None if resolved.teacher is None else resolved.teacher.directory,
            resume_dir=claim.resume_dir,
            recipe=claim.recipe,
            cache_dir=settings.signals_dir,
        ),
    )
    return run


def link_best_weights(earlier: Path, checkpoints: Path) -> None:
    """Link the best weights that an earlier attempt kept into this attempt's checkpoints.

    The next attempt resumes from this one's checkpoints alone, and those may still refer to much
    older best weights. Links, since the weights of a 32B model are 64 GB.
    """
    for best in earlier.glob(f"best-*/{COMPLETE}"):
        final = checkpoints / best.parent.name
        partial = shared_partial_path(final)
        if final.exists():
            continue
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(best.parent, partial, copy_function=_link)
        partial.rename(final)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without links
        shutil.copy2(source, target)


def supervise(
    launch: Launch,
    *,
    run: RunDirectory,
    beat: Callable[[], HeartbeatReply],
    stopping: Callable[[], bool],
    settings: JobSettings,
    timeout_seconds: float,
) -> RunExit | None:
    """Run the ranks and return how they ended, or None when another worker has the job.

    `beat` is called every `heartbeat_seconds`; `stopping` returns whether this worker is
    shutting down. No process of the run survives this call, even after an exception.
    """
    engine, name = LocalEngine(), run.path.name
    supervision = _Supervision(
        run, engine=engine, name=name, settings=settings, timeout_seconds=timeout_seconds
    )
    engine.submit(Submission(name=name, run=run, launch=launch))
    try:
        while (status := engine.status([name])[name]).state is EngineState.RUNNING:
            try:
                if supervision.is_beat_due():
                    supervision.note_cgroups()
                    if supervision.handle_reply(beat()) is HeartbeatReply.LOST:
                        return None
                if stopping():
                    supervision.request_stop("handed_back")
                supervision.escalate()
            except OSError as error:
                # It passes, and the ranks work meanwhile; if it does not, the lease runs out.
                if error.errno not in NO_DESCRIPTORS:
                    raise
                log.warning("supervision_waits", run=str(run.path), error=str(error))
            engine.wait(name, _TICK_SECONDS)
        last = beat()  # the final lines of progress, and a lease that covers the outcome
        assert status.exit_code is not None
        return None if last is HeartbeatReply.LOST else supervision.result(status.exit_code)
    finally:
        engine.kill_remains(name)


class _Supervision:
    """The timers of one run: heartbeats, the time limit, and the escalation against ranks that must end."""

    def __init__(
        self,
        run: RunDirectory,
        *,
        engine: LocalEngine,
        name: str,
        settings: JobSettings,
        timeout_seconds: float,
    ) -> None:
        self._run = run
        self._engine = engine
        self._name = name
        self._settings = settings
        self._started = time.monotonic()
        self._timeout_at = self._started + timeout_seconds
        self._beat_at = self._started
        self._stop: StopReason | None = None
        self._force = Force.NONE
        self._escalate_at = float("inf")
        self._counters = OomCounters()
        self._counters.track(["self"])

    def note_cgroups(self) -> None:
        """Record the memory cgroups of the ranks while they are alive."""
        self._counters.track(self._engine.pids(self._name))

    def is_beat_due(self) -> bool:
        if time.monotonic() < self._beat_at:
            return False
        self._beat_at = time.monotonic() + self._settings.heartbeat_seconds
        return True

    def handle_reply(self, beat: HeartbeatReply) -> HeartbeatReply:
        """Act on the database's answer to a heartbeat."""
        if beat is HeartbeatReply.CANCEL:
            self.request_stop("cancelled")
        return beat

    def request_stop(self, reason: StopReason) -> None:
        """Request once that the ranks save and exit; a cancellation overrides a shutdown."""
        if self._stop == reason or self._stop in ("cancelled", "timed_out"):
            return
        if self._stop is None:
            write_json(self._run.stop, StopRequest(reason=reason))
            self._escalate_at = time.monotonic() + self._settings.stop_grace_seconds
        self._stop = reason
        log.info("stop_requested", run=str(self._run.path), reason=reason)

    def escalate(self) -> None:
        """Stop the ranks at the time limit; after each grace period use more force."""
        now = time.monotonic()
        if now > self._timeout_at:
            self._timeout_at = float("inf")
            self.request_stop("timed_out")
        if now < self._escalate_at:
            return
        if self._force is Force.NONE:
            self._force = Force.TERMINATED
            self._escalate_at = now + _TERMINATE_SECONDS
            self._engine.cancel(self._name)
        else:
            self._force = Force.KILLED
            self._escalate_at = float("inf")
            self._engine.cancel(self._name, kill=True)

    def result(self, exit_code: int) -> RunExit:
        return RunExit(
            exit_code=exit_code,
            stop=self._stop,
            force=self._force,
            oom_killed=self._counters.killed(),
            seconds=time.monotonic() - self._started,
        )
