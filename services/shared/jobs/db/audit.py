"""The audit log: who wrote what, from where, and what became of it. Rows are only ever appended."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Literal

import structlog
from sqlalchemy import Engine, delete, func, insert, select, text
from sqlalchemy.orm import Session

from services.shared.jobs.db.connection import transaction
from services.shared.jobs.db.pagination import checked_limit, cursor_seq
from services.shared.jobs.db.tables import AuditRow
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.projects import DEFAULT_PROJECT
from services.shared.jobs.views import AuditView, Page

log = structlog.get_logger(__name__)

AuditOutcome = Literal["done", "refused", "failed"]
_MAX_PENDING = 10_000
_EXPIRED_AT_ONCE = 10_000


@dataclass(frozen=True, kw_only=True)
class AuditEntry:
    """One write, or one refusal of a write."""

    key_name: str
    action: str  # the operation's id in the OpenAPI document
    outcome: AuditOutcome
    project: str = DEFAULT_PROJECT  # of the key
    key_id: str | None = None  # the beginning of the key's hash
    target: str | None = None  # the id in the path of the request
    created: str | None = None  # the id of what it created
    address: str | None = None
    request_id: str | None = None
    status: int | None = None  # of HTTP
    detail: str | None = None
    created_at: datetime | None = None  # now, if left out


def append(session: Session, entry: AuditEntry) -> None:
    """Append an entry in the transaction of what it records."""
    values = {name: value for name, value in asdict(entry).items() if value is not None}
    session.execute(insert(AuditRow).values(values))


class AuditLog:
    """Appends entries to the database, and reads them; entries outlive an outage of the database."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._pending: deque[AuditEntry] = deque(maxlen=_MAX_PENDING)  # oldest first

    def record(self, entry: AuditEntry) -> None:
        """Append an entry, and then those that could not be appended before.

        While the database is away, the entry is in the log of this process and kept in memory.
        """
        try:
            self._append(entry)
        except Unavailable:
            log.error("audit_not_stored", **{**asdict(entry), "created_at": str(entry.created_at)})
            self._pending.append(entry)
            return
        self._append_pending()

    def _append(self, entry: AuditEntry) -> None:
        with transaction(self._engine) as session:
            append(session, entry)

    def _append_pending(self) -> None:
        while True:
            try:
                entry = self._pending.popleft()
            except IndexError:
                return
            try:
                self._append(entry)
            except Unavailable:
                self._pending.appendleft(entry)
                return

    def page(
        self,
        *,
        key_name: str | None = None,
        project: str | None = None,
        action: str | None = None,
        target: str | None = None,
        cursor: str | None = None,
        limit: int = 50,
    ) -> Page[AuditView]:
        """Return entries, newest first; raises InvalidRequest for a wrong cursor or limit."""
        query = select(AuditRow).order_by(AuditRow.seq.desc())
        wanted = {"key_name": key_name, "project": project, "action": action}
        for name, value in wanted.items():
            if value is not None:
                query = query.where(getattr(AuditRow, name) == value)
        if target is not None:
            query = query.where((AuditRow.target == target) | (AuditRow.created == target))
        before = cursor_seq(cursor)
        if before is not None:
            query = query.where(AuditRow.seq < before)
        with transaction(self._engine) as session:
            rows = session.scalars(query.limit(checked_limit(limit) + 1)).all()
        items = [AuditView.model_validate(row, from_attributes=True) for row in rows[:limit]]
        return Page(items=items, next_cursor=str(items[-1].seq) if len(rows) > limit else None)

    def expire(self, *, older_than: timedelta) -> int:
        """Remove the oldest entries beyond an age; return their number, at most 10,000 a call."""
        with transaction(self._engine) as session:
            before = session.scalars(select(func.now() - older_than)).one()
            session.execute(
                text("SELECT set_config('stillhouse.audit_expiry', :before, true)"),
                {"before": before.isoformat()},
            )
            old = select(AuditRow.seq).where(AuditRow.created_at < before).limit(_EXPIRED_AT_ONCE)
            removed = session.execute(
                delete(AuditRow).where(AuditRow.seq.in_(old)).returning(AuditRow.seq)
            )
            return len(removed.all())
