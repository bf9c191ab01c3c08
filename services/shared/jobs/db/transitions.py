"""The one function that changes a job's state, and the state that follows an attempt's end."""

from __future__ import annotations

from typing import Any

from sqlalchemy import func, insert, update
from sqlalchemy.orm import Session

from services.shared.jobs.db.tables import EventRow, JobRow
from services.shared.jobs.documents import EventDataDict
from services.shared.jobs.outcome import End
from services.shared.jobs.state import TERMINAL, JobState, Reason, sources
from services.shared.jobs.views import EventType

# Of a row to insert or update, by column: values or SQL expressions.
ColumnValues = dict[str, Any]

_NO_LEASE = {"token": None, "lease_until": None, "worker": None}
_LEASED = frozenset({JobState.RUNNING, JobState.CANCELLING})


def transition(
    session: Session,
    job_id: str,
    target: JobState,
    *,
    held_by: str | None = None,
    reason: Reason | None = None,
    message: str | None = None,
    **columns: Any,
) -> bool:
    """Move a job to `target` where the transition table has an arrow; append the event.

    Returns False, having changed nothing, when no transition leads from the job's state to `target`,
    or the job no longer has the token `held_by` (where one is given). Further columns of the row are
    set in the same UPDATE.
    """
    guard = [JobRow.id == job_id, JobRow.state.in_(sorted(sources(target)))]
    if held_by is not None:
        guard.append(JobRow.token == held_by)
    attempt = session.execute(
        update(JobRow)
        .where(*guard)
        .values(state=target, reason=reason, message=message, **(_implied(target) | columns))
        .returning(JobRow.attempt)
    ).scalar_one_or_none()
    if attempt is None:
        return False
    append_state_event(session, job_id, target, attempt=attempt, reason=reason, message=message)
    return True


def append_state_event(
    session: Session,
    job_id: str,
    state: JobState,
    *,
    attempt: int,
    reason: Reason | None = None,
    message: str | None = None,
) -> None:
    """Append the event of a job's new state."""
    data: EventDataDict = {"state": state}
    if reason is not None:
        data["reason"] = reason
    if message is not None:
        data["message"] = message
    append_event(session, job_id, EventType.STATE, attempt=attempt, data=data)


def append_event(
    session: Session, job_id: str, type: EventType, *, attempt: int, data: EventDataDict
) -> None:
    """Append to the event stream; the caller holds the lock of the job's row."""
    session.execute(insert(EventRow).values(job_id=job_id, attempt=attempt, type=type, data=data))


def next_state(
    end: End, *, state: JobState, reason: Reason | None, attempts_left: bool
) -> tuple[JobState, Reason | None]:
    """Return the next state, and its reason, of a job in `state` whose attempt has ended.

    A job that is being cancelled is never queued again: instead of another attempt it is
    cancelled. The result of a run that succeeded or failed before it noticed is kept.
    """
    if end is End.SUCCEEDED:
        return JobState.SUCCEEDED, None
    if end is End.FAILED:
        return JobState.FAILED, reason or Reason.CRASHED
    if end is End.CANCELLED or state is JobState.CANCELLING:
        return JobState.CANCELLED, Reason.CANCELLED
    if end is End.HANDED_BACK or attempts_left:
        return JobState.QUEUED, None
    return JobState.FAILED, reason or Reason.CRASHED


def _implied(target: JobState) -> ColumnValues:
    """Return the columns that a state fixes, whatever led to it."""
    columns: ColumnValues = {} if target in _LEASED else dict(_NO_LEASE)
    if target is JobState.QUEUED:
        columns |= {"sent_at": func.now(), "phase": None}
    if target in TERMINAL:
        columns |= {"ended_at": func.now()}
    return columns
