"""How much is stored: by key, by table, and over time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, insert, select, text
from sqlalchemy.orm import Session

from services.shared.jobs.db.tables import DatasetRow, JobRow, ModelRow, UsageSampleRow
from services.shared.jobs.errors import QueueQuotaExceeded, StorageQuotaExceeded
from services.shared.jobs.projects import Access
from services.shared.jobs.state import JobState


@dataclass(frozen=True)
class UsageSample:
    """The use of the disk at one moment."""

    taken_at: datetime
    disk_total_bytes: int
    disk_used_bytes: int
    stored_bytes: dict[str, int]  # by kind of file


def add_sample(
    session: Session, *, total_bytes: int, used_bytes: int, stored_bytes: dict[str, int]
) -> None:
    """Append a sample, taken now."""
    session.execute(
        insert(UsageSampleRow).values(
            taken_at=func.now(),
            disk_total_bytes=total_bytes,
            disk_used_bytes=used_bytes,
            stored_bytes=stored_bytes,
        )
    )


def drop_samples(session: Session, *, before: datetime) -> None:
    """Delete old samples."""
    session.execute(delete(UsageSampleRow).where(UsageSampleRow.taken_at < before))


def samples(session: Session, *, since: datetime) -> list[UsageSample]:
    """Return the samples since a moment, in order."""
    rows = session.scalars(
        select(UsageSampleRow)
        .where(UsageSampleRow.taken_at >= since)
        .order_by(UsageSampleRow.taken_at)
    )
    names = UsageSample.__dataclass_fields__
    return [UsageSample(**{name: getattr(row, name) for name in names}) for row in rows]


def database_bytes(session: Session) -> int:
    """Return the size of this database on its disk."""
    size = session.scalars(select(func.pg_database_size(func.current_database()))).one()
    return int(size)


def table_rows(session: Session) -> dict[str, int]:
    """Return the rows of each table, as Postgres's statistics count them."""
    query = "SELECT relname, n_live_tup FROM pg_stat_user_tables WHERE schemaname = 'public'"
    return {str(name): int(rows) for name, rows in session.execute(text(query))}


def stored_bytes(session: Session, creator: str) -> int:
    """Return the bytes of the datasets and models of a key whose files are not gone."""
    datasets = select(func.coalesce(func.sum(DatasetRow.size_bytes), 0)).where(
        DatasetRow.created_by == creator, DatasetRow.purged_at.is_(None)
    )
    models = (
        select(func.coalesce(func.sum(ModelRow.size_bytes), 0))
        .join(JobRow, JobRow.id == ModelRow.job_id)
        .where(JobRow.created_by == creator, ModelRow.purged_at.is_(None))
    )
    return sum(int(session.scalars(query).one()) for query in (datasets, models))


def check_storage(session: Session, access: Access, *, more_bytes: int = 0) -> None:
    """Raise StorageQuotaExceeded where the key has no room for more bytes."""
    limit = access.quota.stored_bytes
    if limit is None or access.actor is None:
        return
    stored = stored_bytes(session, access.actor)
    if stored + max(more_bytes, 1) > limit:
        raise StorageQuotaExceeded(access.actor, stored, limit)


def check_queue(session: Session, access: Access) -> None:
    """Raise QueueQuotaExceeded where the key has as many queued jobs as it may.

    Locks the key's count until the transaction ends, so that parallel requests do not pass together.
    """
    limit = access.quota.queued_jobs
    if limit is None or access.actor is None:
        return
    _lock(session, access.actor)
    states = (JobState.WAITING, JobState.QUEUED)
    if _count(session, access.actor, states) >= limit:
        raise QueueQuotaExceeded(access.actor, limit)


def running_hold(session: Session, job_id: str) -> str | None:
    """Return why a queued job must wait: its key has as many running jobs as it may; else None."""
    found = session.execute(
        select(JobRow.created_by, JobRow.running_quota).where(JobRow.id == job_id)
    ).one_or_none()
    if found is None or found.created_by is None or found.running_quota is None:
        return None
    _lock(session, found.created_by)
    running = _count(session, found.created_by, (JobState.RUNNING, JobState.CANCELLING))
    if running < found.running_quota:
        return None
    return (
        f"Waits: the key {found.created_by} runs {running} jobs, and its quota is "
        f"{found.running_quota} at once."
    )


def _lock(session: Session, creator: str) -> None:
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(creator, 0))))


def _count(session: Session, creator: str, states: tuple[JobState, ...]) -> int:
    query = select(func.count()).where(JobRow.created_by == creator, JobRow.state.in_(states))
    return session.scalars(query).one()
