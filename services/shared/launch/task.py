"""Handling of one message: claim, run, apply. No database session is open while the ranks run."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeVar

import structlog

from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.ids import new_token
from services.shared.jobs.lifecycle.disk import full_disk_for_jobs
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.state import Reason
from services.shared.jobs.views import Claim, FinishResult, QueuedJob
from services.shared.launch.aftermath.memory_failure import examine_memory
from services.shared.launch.aftermath.outcome import determine_outcome
from services.shared.launch.heartbeat import Heartbeat
from services.shared.launch.settle import leaves_choices, settle
from services.shared.launch.supervise import RunExit, prepare, supervise
from services.shared.launch.torchrun import plan_launch

log = structlog.get_logger(__name__)

# A result that took days to compute outlives a restart of the database.
_APPLY_SECONDS = 600.0
# Long enough for a restart; an abandoned message is sent again by the sweep.
_CLAIM_SECONDS = 60.0
_FIRST_PAUSE_SECONDS = 1.0
# What the machine lacks for now; none says anything about the job.
_PASSING_ERRNOS = frozenset(
    {
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.EAGAIN,
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
    }
)
_MAX_PASSED_OVER = 100

T = TypeVar("T")


def run_job(
    job_id: str,
    *,
    store: Store,
    module: str,
    worker: str,
    stopping: Callable[[], bool],
    send: Callable[[QueuedJob], object],
) -> None:
    """Claim the job whose turn it is, run `module` on its ranks, apply the outcome, send the jobs it released.

    A message says that some job of its kind is queued, and mostly finds another one than `job_id`. A
    duplicate or late message finds nothing to claim and is dropped.
    """
    if _is_held(job_id, store=store):
        return
    claim = _claim_in_turn(job_id, store=store, worker=worker, stopping=stopping)
    if claim is None:
        log.info("nothing_to_claim", job_id=job_id)
        return
    job_id = claim.job_id
    log.info("claimed", job_id=job_id, attempt=claim.attempt)
    outcome = claim.problem or _run(claim, store=store, module=module, stopping=stopping)
    if outcome is None:
        log.warning("lease_lost", job_id=job_id, attempt=claim.attempt)
        return
    finished = _apply(claim, outcome, store=store)
    log.info(
        "finished",
        job_id=job_id,
        attempt=claim.attempt,
        end=outcome.end,
        reason=outcome.reason,
        applied=finished.applied,
    )
    for ticket in finished.to_send:
        send(ticket)


def _is_held(job_id: str, *, store: Store) -> bool:
    """Return whether the job waits because the disk is too full; it is sent again by the sweep."""
    why = full_disk_for_jobs(store.settings)
    if why is None:
        return False
    log.warning("job_held", job_id=job_id, why=why)
    try:
        LifecycleStore(store).hold(job_id, f"Waits: {why}.")
    except Unavailable as error:
        log.warning("hold_not_recorded", job_id=job_id, error=str(error))
    return True


def _claim_in_turn(
    job_id: str, *, store: Store, worker: str, stopping: Callable[[], bool]
) -> Claim | None:
    """Claim the job whose turn it is, passing over those that cannot be claimed; None if there is none.

    Waits for an unavailable database. Raises Unavailable after a minute.
    """
    passed_over: list[str] = []
    while len(passed_over) < _MAX_PASSED_OVER:
        chosen = _until_available(
            partial(store.next_in_turn, job_id, passed_over=passed_over), stopping=stopping
        )
        if chosen is None:
            return None
        # The token stays the same, so that a claim whose reply was lost is found again.
        claim = _until_available(
            partial(
                store.claim,
                chosen,
                worker=worker,
                token=new_token(),
                lease_seconds=store.settings.lease_seconds,
            ),
            stopping=stopping,
        )
        if claim is not None:
            return claim
        passed_over.append(chosen)
    return None


def _until_available(ask: Callable[[], T], *, stopping: Callable[[], bool]) -> T:
    """Return the database's answer. Raises Unavailable where there is none for a minute."""
    deadline = time.monotonic() + _CLAIM_SECONDS
    while True:
        try:
            return ask()
        except Unavailable as error:
            if stopping() or time.monotonic() > deadline:
                raise
            log.warning("claim_waits", error=str(error))
            time.sleep(_FIRST_PAUSE_SECONDS)


def _run(
    claim: Claim, *, store: Store, module: str, stopping: Callable[[], bool]
) -> Outcome | None:
    """Run the ranks and return the outcome; None when the lease was lost."""
    settings = store.settings
    run = RunDirectory(settings.run_dir(claim.job_id, claim.attempt))
    try:
        run = prepare(claim, settings=settings)
        if leaves_choices(claim):
            settled = settle(claim, run=run, store=store, stopping=stopping)
            if settled is None:
                return None
            if isinstance(settled, RunExit):
                return _outcome(settled, claim, run=run, settings=settings)
            if not _store_choices(settled, store=store, stopping=stopping):
                return None
            claim = settled
            run = prepare(claim, settings=settings)
        launch = plan_launch(
            module,
            run.path,
            resources=claim.spec.resources,
            environment=os.environ,
            offloads=claim.recipe.get("offload", "none") != "none",
        )
        for warning in launch.warnings:
            log.warning("launch", job_id=claim.job_id, message=warning)
        heartbeat = Heartbeat(store, claim, run=run, lease_seconds=settings.lease_seconds)
        ending = supervise(
            launch,
            run=run,
            beat=heartbeat.beat,
            stopping=stopping,
            settings=settings,
            timeout_seconds=claim.spec.timeout_seconds,
        )
        if ending is None:
            return None
        outcome = _outcome(ending, claim, run=run, settings=settings)
        return _publish(outcome, run.export, settings.model_dir(claim.model_id))
    except OSError as error:
        return _disk_failure(error, run.path)
    except Exception as error:
        # The boundary of a job: a fault of the worker must not make the job run and fail repeatedly.
        log.exception("worker_failed", job_id=claim.job_id, attempt=claim.attempt)
        # The text stays in the log: it may hold SQL, paths or tokens, and a job's message is public.
        what = f"{type(error).__name__}; see the worker's log"
        return _failed(Reason.CRASHED, f"The worker itself failed, not the ranks: {what}")


def _store_choices(claim: Claim, *, store: Store, stopping: Callable[[], bool]) -> bool:
    """Store what was decided, waiting for an unavailable database; False where the lease was lost.

    Where it stays away, the attempt is left to the sweep: an outage is no fault of the job.
    """
    try:
        return _until_available(lambda: store.settle(claim), stopping=stopping)
    except Unavailable as error:
        log.warning("choices_not_stored", job_id=claim.job_id, error=str(error))
        return False


def _outcome(ending: RunExit, claim: Claim, *, run: RunDirectory, settings: JobSettings) -> Outcome:
    return determine_outcome(
        run,
        ending,
        examine=lambda cause: examine_memory(
            cause, claim=claim, run=run, settings=settings, exit_code=ending.exit_code
        ),
        may_retry=claim.spec.on_out_of_memory == "retry",
    )


def _publish(outcome: Outcome, export: Path, destination: Path) -> Outcome:
    """Move the finished artifact to the directory of models. Raises OSError.

    One rename: a model is complete or absent.
    """
    if outcome.end is not End.SUCCEEDED:
        return outcome
    if not export.is_dir():
        return _failed(
            Reason.CRASHED, f"The ranks reported success but left no artifact in {export}."
        )
    destination.parent.mkdir(parents=True, exist_ok=True)
    export.rename(destination)
    return outcome


def _apply(claim: Claim, outcome: Outcome, *, store: Store) -> FinishResult:
    """Apply the outcome, waiting for an unavailable database; then remove files no longer needed."""
    finished = _finish(claim, outcome, store=store)
    settings = store.settings
    if outcome.end is End.SUCCEEDED and not finished.applied:
        shutil.rmtree(settings.model_dir(claim.model_id), ignore_errors=True)
    if outcome.end is End.SUCCEEDED and finished.applied:
        with LifecycleStore(store).removal() as may_remove:  # a backup may read them
            if may_remove:
                _drop_checkpoints(settings.runs_dir / claim.job_id)
    return finished


def _finish(claim: Claim, outcome: Outcome, *, store: Store) -> FinishResult:
    deadline = time.monotonic() + _APPLY_SECONDS
    pause = _FIRST_PAUSE_SECONDS
    while True:
        try:
            return store.finish(claim, outcome)
        except Unavailable as error:
            if time.monotonic() > deadline:
                raise
            log.warning("finish_waits", job_id=claim.job_id, error=str(error))
            time.sleep(pause)
            pause = min(pause * 2, 30.0)


def _drop_checkpoints(attempts: Path) -> None:
    """Remove the checkpoints of a job whose model is registered: hundreds of gigabytes at 32B."""
    for run in _directories(attempts):
        shutil.rmtree(RunDirectory(run).checkpoints, ignore_errors=True)


def _directories(path: Path) -> Iterable[Path]:
    return [entry for entry in path.iterdir() if entry.is_dir()] if path.is_dir() else []


def _disk_failure(error: OSError, run_dir: Path) -> Outcome:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        message = f"No space is left for {run_dir}: free some and retry the job."
        return _failed(Reason.DISK_FULL, message)
    message = f"The worker could not run the job in {run_dir}: {error}"
    if error.errno in _PASSING_ERRNOS:
        return Outcome(end=End.RETRY, reason=Reason.LAUNCH_FAILED, message=message)
    return _failed(Reason.LAUNCH_FAILED, message)


def _failed(reason: Reason, message: str) -> Outcome:
    return Outcome(end=End.FAILED, reason=reason, message=message)
