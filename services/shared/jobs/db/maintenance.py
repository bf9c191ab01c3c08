"""Maintenance mode: a row in the database that stops writes and claims, and says why."""

from __future__ import annotations

from sqlalchemy import ColumnElement, Engine, delete, exists, func, select
from sqlalchemy.dialects.postgresql import insert

from services.shared.jobs.db.connection import transaction
from services.shared.jobs.db.tables import MaintenanceRow
from services.shared.jobs.views import MaintenanceView


def is_on() -> ColumnElement[bool]:
    """Return the condition that maintenance mode is on."""
    return exists(select(MaintenanceRow.only_row))


class Maintenance:
    """Starts and ends maintenance mode. Every method raises Unavailable when the database is away."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def current(self) -> MaintenanceView | None:
        """Return why and since when maintenance mode is on, or None."""
        with transaction(self._engine) as session:
            row = session.scalar(select(MaintenanceRow))
            return row and MaintenanceView.model_validate(row, from_attributes=True)

    def start(self, *, reason: str, by: str) -> MaintenanceView:
        """Start it, or change its reason."""
        values = {"reason": reason, "started_by": by, "started_at": func.now()}
        with transaction(self._engine) as session:
            row = session.scalars(
                insert(MaintenanceRow)
                .values(values)
                .on_conflict_do_update(index_elements=["only_row"], set_=values)
                .returning(MaintenanceRow)
            ).one()
            return MaintenanceView.model_validate(row, from_attributes=True)

    def end(self) -> None:
        """End it; harmless where it is off."""
        with transaction(self._engine) as session:
            session.execute(delete(MaintenanceRow))
