"""Attempts of workers: claim, heartbeat, finish; and the end of those whose lease expired."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from services.shared.jobs.db import job_queries, maintenance, model_queries, usage_queries
from services.shared.jobs.db.tables import IS_LEASED, IS_QUEUED, AttemptRow, JobRow
from services.shared.jobs.db.transitions import ColumnValues, append_event, next_state, transition
from services.shared.jobs.db.turns import take_turn
from services.shared.jobs.documents import EventDataDict, JobPlanDict, ProgressDict, RecipeFields
from services.shared.jobs.errors import InvalidTransition
from services.shared.jobs.gates import GateFloor
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.spec import DistillSpec, Recipe, TeacherSpec
from services.shared.jobs.state import JobState, Phase, Reason
from services.shared.jobs.views import EventType, FinishResult, HeartbeatReply, Kind, QueuedJob

LOST = "lost"  # the ending of an attempt whose lease expired
MAX_FREE_LOSSES = 10


@dataclass(frozen=True, kw_only=True)
class ClaimedRow:
    """The row of a job just claimed, and its earlier attempts; `claims` adds the directories."""

    job: JobRow
    earlier: list[tuple[str, int]]  # (job id, attempt) that may have checkpoints, best first


def claim(
    session: Session,
    job_id: str,
    *,
    worker: str,
    token: str,
    lease_seconds: float,
    last_on_disk: int = 0,
) -> ClaimedRow | None:
    """Take a queued job, or return None when it is not queued: a duplicate or late message.

    The attempt's number is above `last_on_disk`, the highest that has files: a database restored from
    a backup does not know all of them. Idempotent: repeated with the same token after a lost response,
    it returns the same attempt.
    """
    why = usage_queries.running_hold(session, job_id)
    if why is not None and _held(session, job_id, token) is None:
        session.execute(
            update(JobRow)
            .where(JobRow.id == job_id, JobRow.state == JobState.QUEUED)
            .values(message=why)
        )
        return None
    if not transition(
        session,
        job_id,
        JobState.RUNNING,
        token=token,
        worker=worker,
        lease_until=_lease_until(lease_seconds),
        attempt=func.greatest(JobRow.attempt, last_on_disk) + 1,
        used_attempts=JobRow.used_attempts + 1,
        started_at=func.coalesce(JobRow.started_at, func.now()),
        phase=Phase.LAUNCHING,
        progress=None,
    ):
        mine = _held(session, job_id, token)
        return (
            None if mine is None else ClaimedRow(job=mine, earlier=_earlier_attempts(session, mine))
        )
    job = job_queries.get(session, job_id)
    take_turn(session, job)
    session.execute(
        insert(AttemptRow).values(
            job_id=job_id, number=job.attempt, worker=worker, recipe=job.recipe, plan=job.plan
        )
    )
    return ClaimedRow(job=job, earlier=_earlier_attempts(session, job))


def settle(
    session: Session,
    job_id: str,
    *,
    attempt: int,
    token: str,
    spec: TeacherSpec | DistillSpec,
    recipe: RecipeFields,
    plan: JobPlanDict | None,
) -> bool:
    """Store what was decided before the ranks start, with the job and its attempt; False without lease.

    A later attempt, which resumes from its checkpoints, takes the same.
    """
    job = _held(session, job_id, token)
    if job is None:
        return False
    job.spec, job.recipe, job.plan = spec.model_dump(mode="json"), recipe, plan
    row = session.get_one(AttemptRow, (job_id, attempt))
    row.recipe, row.plan = recipe, plan
    return True


def heartbeat(
    session: Session,
    job_id: str,
    *,
    attempt: int,
    token: str,
    phase: Phase | None,
    progress: ProgressDict | None,
    lease_seconds: float,
) -> HeartbeatReply:
    """Renew the lease and copy progress; a new phase or evaluation becomes an event.

    A worker whose lease expired takes its job back, unless another has claimed it meanwhile.
    """
    job = _held(session, job_id, token) or _taken_back(session, job_id, attempt, token)
    if job is None:
        return HeartbeatReply.LOST
    columns: ColumnValues = {"lease_until": _lease_until(lease_seconds)}
    if phase is not None and phase != job.phase:
        columns["phase"] = phase
        append_event(session, job_id, EventType.PHASE, attempt=job.attempt, data={"phase": phase})
    if progress:
        columns["progress"] = (job.progress or {}) | progress
        evaluation = progress.get("evaluation")
        if evaluation and evaluation != job.metrics:
            columns["metrics"] = evaluation
            data: EventDataDict = {"evaluation": evaluation}
            if "step" in progress:
                data["step"] = progress["step"]
            if "epoch" in progress:
                data["epoch"] = progress["epoch"]
            append_event(session, job_id, EventType.EVALUATION, attempt=job.attempt, data=data)
    session.execute(update(JobRow).where(JobRow.id == job_id).values(**columns))
    return HeartbeatReply.CANCEL if job.state == JobState.CANCELLING else HeartbeatReply.CONTINUE


def finish(
    session: Session,
    job_id: str,
    *,
    attempt: int,
    token: str,
    outcome: Outcome,
    floor: GateFloor = GateFloor(),
) -> FinishResult:
    """Apply how an attempt ended, unless its lease was lost.

    Idempotent: repeated after a lost response, it reports the outcome as applied and leaves the jobs
    that are to be sent to the sweep.
    """
    job = _held(session, job_id, token)
    if job is None:
        return FinishResult(applied=_ended_as(session, job_id, attempt, outcome.end), to_send=[])
    to_send = _end_attempt(session, job, ending=outcome.end, outcome=outcome, floor=floor)
    return FinishResult(applied=True, to_send=to_send)


def end_lost(session: Session, *, now: datetime | None, limit: int) -> list[QueuedJob]:
    """End attempts whose lease ran out; return the jobs to be sent.

    Rows locked by another transaction are left to the next sweep.
    """
    jobs = session.scalars(
        select(JobRow)
        .where(IS_LEASED, JobRow.lease_until < (now or func.now()))
        .order_by(JobRow.lease_until)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    to_send: list[QueuedJob] = []
    for job in jobs:
        message = f"Worker {job.worker} sent no heartbeat during attempt {job.attempt} until its lease expired."
        lost = Outcome(end=End.RETRY, reason=Reason.LOST, message=message)
        to_send += _end_attempt(session, job, ending=LOST, outcome=lost)
    return to_send


def overdue(
    session: Session, kind: Kind, *, sent_before: datetime | timedelta, limit: int
) -> list[QueuedJob]:
    """Mark the longest queued jobs as sent again and return them; none during maintenance.

    `sent_before` is a moment, or an age by the database's clock.
    """
    if session.scalar(select(maintenance.is_on())):
        return []
    moment = func.now() - sent_before if isinstance(sent_before, timedelta) else sent_before
    ids = session.scalars(
        select(JobRow.id)
        .where(IS_QUEUED, JobRow.kind == kind, JobRow.sent_at < moment)
        .order_by(JobRow.sent_at, JobRow.id)
        .limit(limit)
        .with_for_update(skip_locked=True)
    ).all()
    session.execute(update(JobRow).where(JobRow.id.in_(ids)).values(sent_at=func.now()))
    return [QueuedJob(job_id, kind) for job_id in ids]


def without_result(session: Session, attempts: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return those of (job id, attempt) that are over and have made no model."""
    jobs = {
        row.id: row
        for row in session.execute(
            select(JobRow.id, JobRow.state, JobRow.attempt).where(
                JobRow.id.in_({job_id for job_id, _ in attempts})
            )
        )
    }
    found = []
    for job_id, number in attempts:
        job = jobs.get(job_id)
        if job is None:
            continue
        # Only its last attempt can have made a job's model, or be running.
        may_have_result = job.state in (JobState.SUCCEEDED, JobState.RUNNING, JobState.CANCELLING)
        if number < job.attempt or (number == job.attempt and not may_have_result):
            found.append((job_id, number))
    return found


def succeeded_among(session: Session, job_ids: list[str]) -> list[str]:
    """Return those of the jobs that have succeeded."""
    return list(
        session.scalars(
            select(JobRow.id).where(JobRow.id.in_(job_ids), JobRow.state == JobState.SUCCEEDED)
        )
    )


def _is_free_loss(session: Session, job_id: str) -> bool:
    """Return whether one more lost attempt costs the job none of its `max_attempts`.

    A machine that sleeps or a network that fails is not the job's fault. A job that kills its worker
    every time must end nevertheless.
    """
    return _num_lost(session, job_id) < MAX_FREE_LOSSES


def _num_lost(session: Session, job_id: str) -> int:
    query = select(func.count()).where(AttemptRow.job_id == job_id, AttemptRow.ending == LOST)
    return session.scalar(query) or 0


def _taken_back(session: Session, job_id: str, attempt: int, token: str) -> JobRow | None:
    """Give a job whose attempt was ended as lost back to that attempt, while no other has claimed it."""
    waiting = session.scalar(
        select(JobRow)
        .where(JobRow.id == job_id, JobRow.state == JobState.QUEUED, JobRow.attempt == attempt)
        .with_for_update()
    )
    if waiting is None or not _ended_as(session, job_id, attempt, LOST):
        return None
    was_free = _num_lost(session, job_id) <= MAX_FREE_LOSSES
    row = session.get_one(AttemptRow, (job_id, attempt))
    row.ended_at = row.ending = row.reason = row.message = None
    transition(
        session,
        job_id,
        JobState.RUNNING,
        token=token,
        worker=row.worker,
        lease_until=func.now(),
        used_attempts=JobRow.used_attempts + int(was_free),
    )
    return job_queries.get(session, job_id)


def _ended_as(session: Session, job_id: str, attempt: int, end: End | str) -> bool:
    """Return whether the attempt has this ending, set by its own worker: the sweep sets "lost"."""
    ending = session.scalar(
        select(AttemptRow.ending).where(AttemptRow.job_id == job_id, AttemptRow.number == attempt)
    )
    return ending == end


def _end_attempt(
    session: Session,
    job: JobRow,
    *,
    ending: End | str,
    outcome: Outcome,
    floor: GateFloor = GateFloor(),
) -> list[QueuedJob]:
    """End the running attempt of a locked job; return the jobs to be sent."""
    is_free = ending == End.HANDED_BACK or (ending == LOST and _is_free_loss(session, job.id))
    target, reason = next_state(
        outcome.end,
        state=JobState(job.state),
        reason=outcome.reason,
        attempts_left=is_free or job.used_attempts < job.max_attempts,
    )
    moved = transition(
        session,
        job.id,
        target,
        held_by=job.token,
        reason=reason,
        message=outcome.message or None,
        **_result_columns(job, outcome, target, is_free=is_free),
    )
    if not moved:
        raise InvalidTransition(job.id, job.state, target)
    session.execute(
        update(AttemptRow)
        .where(AttemptRow.job_id == job.id, AttemptRow.number == job.attempt)
        .values(
            ended_at=func.now(),
            ending=ending,
            reason=outcome.reason,
            message=outcome.message or None,
            exit_code=outcome.exit_code,
            failed_rank=outcome.failed_rank,
            measured=outcome.measured or None,
            observed=outcome.observed or None,
            diagnosis=outcome.diagnosis,
            failure=outcome.failure,
        )
    )
    if target is JobState.QUEUED:
        return [QueuedJob(job.id, job.kind)]
    if target is JobState.SUCCEEDED:
        assert outcome.report is not None
        model_queries.add(session, job, outcome.report, floor=floor)
    return job_queries.release_children(session, job.id)


def _result_columns(
    job: JobRow, outcome: Outcome, target: JobState, *, is_free: bool
) -> ColumnValues:
    """Return the columns of the job, other than its state, that the end of an attempt changes."""
    columns: ColumnValues = {}
    if outcome.measured:
        columns["measured"] = outcome.measured
    if outcome.observed:
        columns["observed"] = outcome.observed
    if outcome.diagnosis is not None:
        columns["diagnosis"] = outcome.diagnosis
    if outcome.report is not None and outcome.report.evaluation:
        columns["metrics"] = outcome.report.evaluation
    if target is JobState.QUEUED and is_free:
        columns["used_attempts"] = JobRow.used_attempts - 1
    if target is JobState.QUEUED and (outcome.recipe_changes or outcome.plan):
        changed = Recipe.model_validate(job.recipe | outcome.recipe_changes)
        columns["recipe"] = changed.model_dump(mode="json")
        columns["plan"] = outcome.plan
    return columns


def _held(session: Session, job_id: str, token: str) -> JobRow | None:
    """Lock and return the job if `token` still holds it."""
    return session.scalar(
        select(JobRow).where(JobRow.id == job_id, JobRow.token == token).with_for_update()
    )


def _earlier_attempts(session: Session, job: JobRow) -> list[tuple[str, int]]:
    """Return the attempts before this one, latest first, then those of the jobs it retries."""
    found = [(job.id, number) for number in range(job.attempt - 1, 0, -1)]
    ancestor_id = job.retry_of
    while ancestor_id is not None:
        ancestor = job_queries.get(session, ancestor_id)
        found += [(ancestor.id, number) for number in range(ancestor.attempt, 0, -1)]
        ancestor_id = ancestor.retry_of
    return found


def _lease_until(lease_seconds: float) -> Any:
    return func.now() + timedelta(seconds=lease_seconds)
