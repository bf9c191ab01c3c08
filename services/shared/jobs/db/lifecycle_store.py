"""The operations of deletion and retention on the database. One method is one transaction."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from datetime import datetime, timedelta

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from services.shared.jobs.db import deletions, epochs, retention_queries, usage_queries
from services.shared.jobs.db.connection import session_lock, transaction
from services.shared.jobs.db.epochs import Epoch
from services.shared.jobs.db.retention_queries import Kept
from services.shared.jobs.db.store import Store
from services.shared.jobs.db.tables import JobRow
from services.shared.jobs.db.usage_queries import UsageSample
from services.shared.jobs.state import JobState
from services.shared.jobs.views import DeletionView, Resource

# Of whoever removes files; a backup shares it with other backups.
REMOVAL_LOCK = 0x5711_4006


class LifecycleStore:
    """How long datasets, jobs, models and their records stay.

    Every method raises Unavailable when the database does not answer.
    """

    def __init__(self, store: Store) -> None:
        self.engine = store.engine
        self.settings = store.settings
        self.access = store.access
        self._grace = timedelta(days=store.settings.delete_grace_days)

    def _transaction(self) -> AbstractContextManager[Session]:
        return transaction(self.engine, project=self.access.visible_project)

    def now(self) -> datetime:
        """Return the time by the database's clock."""
        with self._transaction() as session:
            return session.scalars(select(func.now())).one()

    def delete(self, resource: Resource, id: str, *, by: str) -> DeletionView:
        """Hide a resource until the sweep removes its files after the grace period.

        Raises NotFound, and InUse while something refers to it.
        """
        with self._transaction() as session:
            return deletions.delete_softly(session, resource, id, by=by, grace=self._grace)

    def restore(self, resource: Resource, id: str) -> None:
        """Undo a deletion whose grace period is not over. Raises NotFound, Conflict."""
        with self._transaction() as session:
            deletions.restore(session, resource, id)

    def due(
        self, resource: Resource, *, now: datetime, after: str = "", limit: int = 500
    ) -> list[str]:
        """Return a page of what was deleted longer ago than the grace period and is not gone."""
        with self._transaction() as session:
            return deletions.due(
                session, resource, before=now - self._grace, after=after, limit=limit
            )

    def purge(self, resource: Resource, id: str, *, now: datetime) -> bool:
        """Mark a resource as gone after its grace period; return whether its files are to be removed."""
        with self._transaction() as session:
            return deletions.purge(session, resource, id, before=now - self._grace)

    def purged_among(self, resource: Resource, ids: list[str]) -> list[str]:
        """Return those of the ids whose files are to be gone."""
        with self._transaction() as session:
            return deletions.purged_among(session, resource, ids)

    def drop_unreferenced(self, *, limit: int = 500) -> int:
        """Delete the rows of what is gone and nothing refers to; return their number."""
        with self._transaction() as session:
            return deletions.drop_unreferenced(session, limit=limit)

    # Retention

    def ended_among(self, job_ids: Collection[str]) -> list[Kept]:
        """Return those of the jobs that have ended and from which no job may resume."""
        with self._transaction() as session:
            return retention_queries.ended_among(session, job_ids)

    def ended_before(
        self, moment: datetime, *, with_events: bool, after: str = "", limit: int = 500
    ) -> list[Kept]:
        """Return a page of jobs that ended before a moment: with events, or without a live model."""
        with self._transaction() as session:
            return retention_queries.ended_before(
                session, moment, with_events=with_events, after=after, limit=limit
            )

    def unpromoted_before(
        self, moment: datetime, *, after: str = "", limit: int = 500
    ) -> list[Kept]:
        """Return a page of models older than a moment that were never promoted."""
        with self._transaction() as session:
            return retention_queries.unpromoted_before(session, moment, after=after, limit=limit)

    def superseded_before(
        self, moment: datetime, *, after: str = "", limit: int = 500
    ) -> list[Kept]:
        """Return a page of models that were promoted before a moment and serve no more."""
        with self._transaction() as session:
            return retention_queries.superseded_before(session, moment, after=after, limit=limit)

    def count_events(self, job_ids: Collection[str]) -> int:
        """Return how many events the jobs have."""
        with self._transaction() as session:
            return retention_queries.count_events(session, job_ids)

    def delete_events(self, job_ids: Collection[str]) -> None:
        """Delete all events of jobs that have ended."""
        with self._transaction() as session:
            retention_queries.delete_events(session, job_ids)

    def removal(self) -> AbstractContextManager[bool]:
        """Yield whether this process may remove files: no other does, and no backup reads them."""
        return session_lock(self.engine, REMOVAL_LOCK)

    # The epoch

    def epoch(self) -> Epoch | None:
        """Return the epoch of the database, None before its first sweep."""
        with self._transaction() as session:
            return epochs.current(session)

    def tick_epoch(self, compare_and_write: Callable[[Epoch], None]) -> None:
        """Pass the epoch to the caller, then count on, while no other process does."""
        with self._transaction() as session:
            epoch = epochs.current(session, lock=True) or epochs.begin(session)
            compare_and_write(epoch)
            epochs.advance(session)

    def begin_epoch(self, write: Callable[[Epoch], None]) -> None:
        """Begin a new epoch and pass it to the caller."""
        with self._transaction() as session:
            write(epochs.begin(session))
            epochs.advance(session)

    # Room

    def hold(self, job_id: str, why: str) -> None:
        """State why a queued job waits."""
        with self._transaction() as session:
            session.execute(
                update(JobRow)
                .where(
                    JobRow.id == job_id,
                    JobRow.state == JobState.QUEUED,
                    JobRow.message.is_distinct_from(why),
                )
                .values(message=why)
            )

    def check_storage(self, *, more_bytes: int = 0) -> None:
        """Raise StorageQuotaExceeded where the key of the access has no room for more bytes."""
        with self._transaction() as session:
            usage_queries.check_storage(session, self.access, more_bytes=more_bytes)

    def add_usage_sample(
        self, *, total_bytes: int, used_bytes: int, stored_bytes: dict[str, int], keep: timedelta
    ) -> None:
        """Append a sample of the disk's use, with the size of the database, and drop old samples."""
        with self._transaction() as session:
            database = usage_queries.database_bytes(session)
            usage_queries.add_sample(
                session,
                total_bytes=total_bytes,
                used_bytes=used_bytes,
                stored_bytes=stored_bytes | {"database": database},
            )
            now = session.scalars(select(func.now())).one()
            usage_queries.drop_samples(session, before=now - keep)

    def usage_samples(self, *, days: float) -> list[UsageSample]:
        """Return the samples of the last days, in order."""
        with self._transaction() as session:
            now = session.scalars(select(func.now())).one()
            return usage_queries.samples(session, since=now - timedelta(days=days))

    def table_rows(self) -> dict[str, int]:
        """Return about how many rows each table has."""
        with self._transaction() as session:
            return usage_queries.table_rows(session)
