"""The operations of deletion and retention on the database. One method is one transaction."""

from __future__ import annotations

from datetime import datetime, timedelta

from sqlalchemy import func, select

from services.shared.jobs.db import deletions
from services.shared.jobs.db.connection import transaction
from services.shared.jobs.db.store import Store
from services.shared.jobs.views import DeletionView, Resource

RESOURCES: tuple[Resource, ...] = ("model", "job", "dataset")  # what refers to others comes first


class LifecycleStore:
    """How long datasets, jobs, models and their records stay.

    Every method raises Unavailable when the database does not answer.
    """

    def __init__(self, store: Store) -> None:
        self.engine = store.engine
        self.settings = store.settings
        self.access = store.access

    def now(self) -> datetime:
        """Return the time by the database's clock."""
        with transaction(self.engine, project=self.access.visible_project) as session:
            return session.scalars(select(func.now())).one()

    def delete(self, resource: Resource, id: str, *, by: str) -> DeletionView:
        """Hide a resource until the sweep removes its files after the grace period.

        Raises NotFound, and InUse while something refers to it.
        """
        grace = timedelta(days=self.settings.delete_grace_days)
        with transaction(self.engine, project=self.access.visible_project) as session:
            return deletions.delete_softly(session, resource, id, by=by, grace=grace)

    def restore(self, resource: Resource, id: str) -> None:
        """Undo a deletion whose grace period is not over. Raises NotFound, Conflict."""
        with transaction(self.engine, project=self.access.visible_project) as session:
            deletions.restore(session, resource, id)

    def purge_due(self, resource: Resource, *, now: datetime, limit: int = 500) -> list[str]:
        """Mark as gone what was deleted longer ago than the grace period; return the ids."""
        before = now - timedelta(days=self.settings.delete_grace_days)
        with transaction(self.engine, project=self.access.visible_project) as session:
            return deletions.purge_due(session, resource, before=before, limit=limit)

    def purged_among(self, resource: Resource, ids: list[str]) -> list[str]:
        """Return those of the ids whose files are to be gone."""
        with transaction(self.engine, project=self.access.visible_project) as session:
            return deletions.purged_among(session, resource, ids)

    def drop_unreferenced(self, *, limit: int = 500) -> int:
        """Delete the rows of what is gone and nothing refers to; return their number."""
        with transaction(self.engine, project=self.access.visible_project) as session:
            return deletions.drop_unreferenced(session, limit=limit)
