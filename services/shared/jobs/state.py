"""States, phases and reasons of jobs, and the table of allowed transitions."""

from __future__ import annotations

from enum import Enum


class JobState(str, Enum):
    """The stage of a job's life; terminal states never change."""

    WAITING = "waiting"  # for its parent job
    QUEUED = "queued"  # for a worker
    RUNNING = "running"
    CANCELLING = "cancelling"  # stop requested; the ranks are saving
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    __str__ = str.__str__


class Phase(str, Enum):
    """What a running attempt is doing, as its ranks last reported."""

    LAUNCHING = "launching"
    LOADING = "loading"
    WRAPPING = "wrapping"
    TRAINING = "training"
    EVALUATING = "evaluating"
    SAVING = "saving"
    EXPORTING = "exporting"
    FINISHING = "finishing"

    __str__ = str.__str__


class Reason(str, Enum):
    """Why a job ended otherwise than by succeeding; stable, read by other programs."""

    DEVICE_OUT_OF_MEMORY = "device_out_of_memory"
    HOST_OUT_OF_MEMORY = "host_out_of_memory"
    NOT_SHARDED = "not_sharded"
    BAD_DATA = "bad_data"
    BAD_MODEL = "bad_model"
    BAD_CHECKPOINT = "bad_checkpoint"
    BAD_SPEC = "bad_spec"
    NON_FINITE_LOSS = "non_finite_loss"
    NON_FINITE_TEACHER = "non_finite_teacher"
    DISK_FULL = "disk_full"
    COLLECTIVE_TIMEOUT = "collective_timeout"
    LAUNCH_FAILED = "launch_failed"
    CRASHED = "crashed"
    LOST = "lost"
    TIMED_OUT = "timed_out"
    PARENT_FAILED = "parent_failed"
    CANCELLED = "cancelled"

    __str__ = str.__str__


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.WAITING: frozenset({JobState.QUEUED, JobState.FAILED, JobState.CANCELLED}),
    JobState.QUEUED: frozenset({JobState.RUNNING, JobState.FAILED, JobState.CANCELLED}),
    JobState.RUNNING: frozenset(
        {JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLING, JobState.QUEUED}
    ),
    JobState.CANCELLING: frozenset({JobState.CANCELLED, JobState.SUCCEEDED, JobState.FAILED}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}


def sources(target: JobState) -> frozenset[JobState]:
    """Return the states from which a job may move to `target`."""
    return frozenset(state for state, targets in TRANSITIONS.items() if target in targets)
