"""Pages of a list, newest first: the cursor is the key of the last item shown."""

from __future__ import annotations

from sqlalchemy import ColumnElement

from services.shared.jobs.db.tables import Deletable
from services.shared.jobs.errors import InvalidRequest

MAX_LIMIT = 500
LARGEST_SEQ = 2**63 - 1  # of a Postgres bigint


def checked_limit(limit: int) -> int:
    """Return the limit; raises InvalidRequest outside of 1 to 500."""
    if not 1 <= limit <= MAX_LIMIT:
        raise InvalidRequest(f"limit: {limit} is not between 1 and {MAX_LIMIT}", field="limit")
    return limit


def shown(kind: type[Deletable], *, deleted: bool) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions of a list: of what is not deleted, or of what is but is not gone yet."""
    if not deleted:
        return (kind.deleted_at.is_(None),)
    return kind.deleted_at.is_not(None), kind.purged_at.is_(None)


def cursor_seq(cursor: str | None) -> int | None:
    """Return the sequence number in a cursor; raises InvalidRequest where there is none."""
    if cursor is None:
        return None
    if not cursor.isascii() or not cursor.isdigit() or int(cursor[:20]) > LARGEST_SEQ:
        raise InvalidRequest(
            f"cursor: {cursor[:40]!r} is not a cursor of this list", field="cursor"
        )
    return int(cursor)
