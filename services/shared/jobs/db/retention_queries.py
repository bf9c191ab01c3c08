"""What retention may remove: ended jobs, their events, models that nobody promoted."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, delete, exists, func, select
from sqlalchemy.orm import Session, aliased

from services.shared.jobs.db import deletions
from services.shared.jobs.db.tables import EventRow, JobRow, ModelRow, PromotionRow
from services.shared.jobs.state import TERMINAL, JobState


@dataclass(frozen=True)
class Kept:
    """A job that has ended, or a model: what decides how long it is kept."""

    id: str
    kind: str
    tags: Sequence[str]
    since: datetime
    succeeded: bool


_JOB = (JobRow.id, JobRow.kind, JobRow.spec["tags"], JobRow.ended_at, JobRow.state)


def ended_among(session: Session, job_ids: Collection[str]) -> list[Kept]:
    """Return those of the jobs that have ended and from whose checkpoints no other job may resume."""
    needed = _needed_by_retries(session)
    rows = session.execute(select(*_JOB).where(JobRow.id.in_(job_ids), JobRow.state.in_(TERMINAL)))
    return [_kept(row) for row in rows if row[0] not in needed]


def ended_before(
    session: Session, moment: datetime, *, with_events: bool, after: str, limit: int
) -> list[Kept]:
    """Return jobs that ended before a moment and are not deleted, by id after one of them.

    `with_events` asks for jobs that have events; otherwise those whose model is live are left out.
    """
    model = aliased(ModelRow)
    condition: ColumnElement[bool] = exists().where(EventRow.job_id == JobRow.id)
    if not with_events:
        live = exists().where(model.job_id == JobRow.id, model.deleted_at.is_(None))
        condition = JobRow.deleted_at.is_(None) & ~live
    query = select(*_JOB).where(JobRow.ended_at < moment, JobRow.id > after, condition)
    return [_kept(row) for row in session.execute(query.order_by(JobRow.id).limit(limit))]


def unpromoted_before(session: Session, moment: datetime, *, after: str, limit: int) -> list[Kept]:
    """Return models older than a moment that were never promoted and have no student, by id."""
    student = aliased(ModelRow)
    query = (
        select(ModelRow.id, ModelRow.kind, JobRow.spec["tags"], ModelRow.created_at, JobRow.state)
        .join(JobRow, JobRow.id == ModelRow.job_id)
        .where(
            ModelRow.created_at < moment,
            ModelRow.id > after,
            ModelRow.deleted_at.is_(None),
            ~exists().where(PromotionRow.model_id == ModelRow.id),
            ~exists().where(student.teacher_model_id == ModelRow.id, student.deleted_at.is_(None)),
        )
    )
    return [_kept(row) for row in session.execute(query.order_by(ModelRow.id).limit(limit))]


def superseded_before(session: Session, moment: datetime, *, after: str, limit: int) -> list[Kept]:
    """Return models whose last promotion is older than a moment and which no alias serves, by id."""
    last = (
        select(PromotionRow.model_id, func.max(PromotionRow.created_at).label("at"))
        .group_by(PromotionRow.model_id)
        .subquery()
    )
    serves = select(PromotionRow.model_id).where(deletions.may_serve())
    query = (
        select(ModelRow.id, ModelRow.kind, JobRow.spec["tags"], last.c.at, JobRow.state)
        .join(JobRow, JobRow.id == ModelRow.job_id)
        .join(last, last.c.model_id == ModelRow.id)
        .where(
            last.c.at < moment,
            ModelRow.id > after,
            ModelRow.deleted_at.is_(None),
            ModelRow.id.not_in(serves),
        )
    )
    return [_kept(row) for row in session.execute(query.order_by(ModelRow.id).limit(limit))]


def count_events(session: Session, job_ids: Collection[str]) -> int:
    """Return how many events the jobs have."""
    query = select(func.count()).where(EventRow.job_id.in_(job_ids))
    return session.scalars(query).one()


def delete_events(session: Session, job_ids: Collection[str]) -> None:
    """Delete all events of jobs that have ended."""
    session.execute(delete(EventRow).where(EventRow.job_id.in_(job_ids)))


def _needed_by_retries(session: Session) -> set[str]:
    """Return the jobs that a job which has not ended retries, directly or through others."""
    active = sorted(set(JobState) - TERMINAL)
    found = (
        select(JobRow.retry_of.label("id"))
        .where(JobRow.state.in_(active), JobRow.retry_of.is_not(None))
        .cte("needed", recursive=True)
    )
    earlier = aliased(JobRow)
    found = found.union(
        select(earlier.retry_of).where(earlier.id == found.c.id, earlier.retry_of.is_not(None))
    )
    return set(session.scalars(select(found.c.id)))


def _kept(row: Sequence[object]) -> Kept:
    id, kind, tags, since, state = row
    assert isinstance(since, datetime)
    return Kept(
        id=str(id),
        kind=str(kind),
        tags=list(map(str, tags)) if isinstance(tags, list) else [],
        since=since,
        succeeded=state == JobState.SUCCEEDED,
    )
