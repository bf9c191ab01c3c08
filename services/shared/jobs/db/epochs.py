"""The epoch of the database: its identity, and a counter that grows with every sweep."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import delete, func, insert, select, update
from sqlalchemy.orm import Session

from services.shared.jobs.db.tables import EpochRow


@dataclass(frozen=True)
class Epoch:
    """The row, and the moment at which it was read."""

    id: str
    counter: int
    ticked_at: datetime
    read_at: datetime


def current(session: Session, *, lock: bool = False) -> Epoch | None:
    """Return the epoch, or None where the database has none yet."""
    query = select(EpochRow.id, EpochRow.counter, EpochRow.ticked_at, func.now())
    row = session.execute(query.with_for_update() if lock else query).one_or_none()
    return None if row is None else Epoch(*row)


def begin(session: Session) -> Epoch:
    """Replace the epoch by a new one, whose counter is 0, and return it."""
    session.execute(delete(EpochRow))
    session.execute(insert(EpochRow).values(id=secrets.token_hex(16)))
    epoch = current(session, lock=True)
    assert epoch is not None
    return epoch


def advance(session: Session) -> None:
    """Count on."""
    session.execute(update(EpochRow).values(counter=EpochRow.counter + 1, ticked_at=func.now()))
