"""Determines the Outcome of an attempt from exit code, rank files, torchrun's log and kernel counters."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, cast

from services.shared.files.tail import read_tail
from services.shared.jobs.documents import (
    FailureDict,
    JobPlanDict,
    MeasuredPeaks,
    ObservedSharding,
    RecipeFields,
)
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.run_directory import (
    Failure,
    MemoryRecord,
    Report,
    RunDirectory,
    read_record,
    read_records,
)
from services.shared.jobs.state import Reason
from services.shared.launch.aftermath.torchelastic_report import (
    RankExit,
    read_error_file,
    read_summary,
)
from services.shared.launch.supervise import Force, RunExit, StopReason
from services.shared.memory.forensics.diagnosis import DiagnosisDict

_MEMORY_REASONS = frozenset(
    {Reason.DEVICE_OUT_OF_MEMORY, Reason.HOST_OUT_OF_MEMORY, Reason.NOT_SHARDED}
)
# Reported by ranks that wait for a failed one, which is the root cause.
_SECONDARY = Reason.COLLECTIVE_TIMEOUT

# Less than this, and neither a log nor a failure's own file could be written.
_DISK_FULL_BYTES = 2**18

_LAST_ERROR = re.compile(
    r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Exit)\b.*)$", re.M
)


@dataclass(frozen=True)
class RootCause:
    """The rank that failed first, and why."""

    reason: Reason
    message: str
    rank: int | None = None
    failure: Failure | None = None  # what the rank reported itself; None after SIGKILL
    log: str = ""  # text that may hold the memory error
    is_fault_of_job: bool = True  # a fault of the job; False if it was killed from outside


@dataclass(frozen=True)
class MemoryFailure:
    """What an examination of a memory failure found."""

    diagnosis: DiagnosisDict | None
    recipe_changes: RecipeFields  # of the first remedy that fits; empty if none does
    plan: JobPlanDict | None = None  # of the recipe so changed, the teacher so placed

    @property
    def has_remedy(self) -> bool:
        """Return whether another attempt would differ; a teacher's placement is in the plan."""
        return bool(self.recipe_changes) or self.plan is not None


class _Measured(TypedDict):
    """The fields of an Outcome that the ranks' probes measured."""

    measured: MeasuredPeaks
    observed: ObservedSharding


Examine = Callable[[RootCause], MemoryFailure]


def determine_outcome(
    run: RunDirectory, ending: RunExit, *, examine: Examine, may_retry: bool
) -> Outcome:
    """Return how the attempt ended.

    `examine` diagnoses a memory failure; with `may_retry` the job gets another attempt after running
    out of memory if a remedy fits. A run that was killed from outside gets
    one in any case, as long as attempts are left: it resumes from its last checkpoint.
    """
    report = read_record(run.report, Report)
    failures = run.failures()
    measured = _measured(run)
    if report is not None and report.outcome == "succeeded" and not failures:
        return Outcome(end=End.SUCCEEDED, exit_code=ending.exit_code, report=report, **measured)
    if not failures or ending.force is not Force.NONE:
        stopped = _after_a_stop(ending, report)
        if stopped is not None:
            return stopped.model_copy(update=measured)
    cause = find_root_cause(run, ending, failures)
    found = examine(cause) if cause.reason in _MEMORY_REASONS else MemoryFailure(None, {})
    retry_with_remedy = may_retry and found.has_remedy and ending.stop is None
    end = _end_of_failure(ending.stop, retry=retry_with_remedy or not cause.is_fault_of_job)
    return Outcome(
        end=end,
        reason=Reason.CANCELLED if end is End.CANCELLED else cause.reason,
        message=cause.message,
        exit_code=ending.exit_code,
        failed_rank=cause.rank,
        diagnosis=found.diagnosis,
        failure=_failure_document(cause.failure),
        recipe_changes=found.recipe_changes if retry_with_remedy else {},
        plan=found.plan if retry_with_remedy else None,
        **measured,
    )


def find_root_cause(run: RunDirectory, ending: RunExit, failures: list[Failure]) -> RootCause:
    """Return the first failure that is not the consequence of another.

    A rank killed by SIGKILL leaves no file; the others then report only that a collective timed out
    or that a connection closed.
    """
    exits = read_summary(run.log)
    primary = [failure for failure in failures if failure.reason is not _SECONDARY]
    if primary:
        first = primary[0]
        is_fault_of_job = (
            first.reason is not Reason.LOST
        )  # the worker was stopped, not the job at fault
        text = _text_of(first)
        return RootCause(
            first.reason, first.message, first.rank, first, text, is_fault_of_job=is_fault_of_job
        )
    reported = {failure.rank for failure in failures}
    unreported = [exit for exit in exits if exit.rank not in reported]
    killed = [exit for exit in unreported if exit.exit_code in (-9, 137)]
    if killed or (ending.exit_code in (-9, 137) and ending.force is not Force.KILLED):
        return _cause_of_kill(killed[0].rank if killed else None, ending)
    died = [exit for exit in unreported if exit.signal_name not in (None, "SIGTERM")]
    if died:
        return _cause_of_signal(died[0])
    if failures:
        first = failures[0]
        return RootCause(first.reason, first.message, first.rank, first, _text_of(first))
    return _cause_in_log(run, exits, ending)


def _after_a_stop(ending: RunExit, report: Report | None) -> Outcome | None:
    """Return the outcome of ranks that stopped, or were ended, on request."""
    stopped = report is not None and report.outcome == "stopped"
    if not stopped and ending.stop is None:
        return None
    reason = ending.stop or (report.stop_reason if report else None) or "handed_back"
    saved = "saved a checkpoint and left" if stopped else "did not save in time and were ended"
    common = {"exit_code": ending.exit_code, "report": report}
    if reason == "cancelled":
        return Outcome(
            end=End.CANCELLED,
            reason=Reason.CANCELLED,
            message=f"Cancelled on request; the ranks {saved}.",
            **common,
        )
    if reason == "timed_out":
        return Outcome(
            end=End.FAILED,
            reason=Reason.TIMED_OUT,
            message=f"The job ran longer than its timeout_seconds; the ranks {saved}. "
            "Retry it with a larger limit: it goes on from its last checkpoint.",
            **common,
        )
    return Outcome(
        end=End.HANDED_BACK, message=f"The worker was shut down; the ranks {saved}.", **common
    )


def _end_of_failure(stop: StopReason | None, *, retry: bool) -> End:
    """Return the end of a failed attempt; ranks that fail while stopping have stopped nonetheless."""
    if stop == "cancelled":
        return End.CANCELLED
    if stop == "handed_back":
        return End.HANDED_BACK
    return End.RETRY if retry else End.FAILED


def _cause_of_kill(rank: int | None, ending: RunExit) -> RootCause:
    process = "torchrun" if rank is None else f"rank {rank}"
    if ending.oom_killed:
        return RootCause(
            Reason.HOST_OUT_OF_MEMORY,
            f"The kernel killed {process} for lack of host memory (its oom_kill counter increased).",
            rank,
            log="Killed: exit code -9, oom_kill counted by the kernel",
        )
    origin = (
        "OOM kills cannot be counted here, so it may have been the kernel"
        if ending.oom_killed is None
        else "the kernel counted no OOM kill, so another process sent the signal"
    )
    return RootCause(
        Reason.CRASHED, f"SIGKILL ended {process}; {origin}.", rank, is_fault_of_job=False
    )


def _cause_of_signal(exit: RankExit) -> RootCause:
    return RootCause(
        Reason.CRASHED,
        f"Rank {exit.rank} was ended by {exit.signal_name}; the end of torchrun.log shows where.",
        exit.rank,
    )


def _cause_in_log(run: RunDirectory, exits: list[RankExit], ending: RunExit) -> RootCause:
    """Return the root cause according to the log, for ranks that wrote no failure file."""
    rank = exits[0].rank if exits else None
    recorded = read_error_file(run.path / "torchrun", rank) if rank is not None else None
    text = recorded or read_tail(run.log, max_bytes=64 * 1024)
    if recorded is None and shutil.disk_usage(run.path).free < _DISK_FULL_BYTES:
        message = f"The ranks ended without an error message, and no disk space is left for {run.path}: free some."
        return RootCause(Reason.DISK_FULL, message, rank, log=text)
    # torchrun's own ChildFailedError ends the log; a rank's error precedes it.
    errors = [line for line in _LAST_ERROR.findall(text) if "ChildFailedError" not in line]
    last = errors[-1] if errors else f"torchrun ended with code {ending.exit_code}"
    started = bool(run.ranks()) or run.progress.exists()
    if started:
        return RootCause(Reason.CRASHED, last, rank, log=text)
    return RootCause(
        Reason.LAUNCH_FAILED, f"The ranks did not start: {last} (see torchrun.log)", rank, log=text
    )


def _failure_document(failure: Failure | None) -> FailureDict | None:
    if failure is None:
        return None
    return cast("FailureDict", failure.model_dump(mode="json"))


def _text_of(failure: Failure) -> str:
    return f"{failure.traceback}\n{failure.error_type}: {failure.message}"


def _measured(run: RunDirectory) -> _Measured:
    """Return the peaks by rank and phase, and what each rank's probe saw after wrapping."""
    measured: MeasuredPeaks = {}
    observed: ObservedSharding = {}
    for rank in run.ranks():
        peaks: dict[str, int] = {}
        for _, record in read_records(run.memory_file(rank), MemoryRecord):
            peak = max(record.peak_allocated_bytes, record.allocated_bytes)
            peaks[record.phase] = max(peaks.get(record.phase, 0), peak)
            if record.observed is not None:
                observed[str(rank)] = record.observed
        if peaks:
            measured[str(rank)] = peaks
    return {"measured": measured, "observed": observed}
