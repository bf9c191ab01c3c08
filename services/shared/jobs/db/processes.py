"""The processes of the API that run, and which promotions each of them serves now."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Collection
from datetime import timedelta

from sqlalchemy import Engine, Select, delete, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session, aliased

from services.shared.jobs.db.connection import transaction
from services.shared.jobs.db.tables import ApiProcessRow, ProcessServingRow, PromotionRow
from services.shared.jobs.views import ProcessServingView

BEAT_SECONDS = 10.0  # how often a process says that it runs
_SILENT = timedelta(seconds=4 * BEAT_SECONDS)  # one that has not said so for this long is not shown
_FORGOTTEN = timedelta(hours=1)  # and after this is no longer stored


def process_name() -> str:
    """Return a name for this process that no other has, not even after a restart in the same container."""
    return f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(2)}"


class ServingProcess:
    """Reports what this process serves. Every method raises Unavailable when the database is away."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self._engine = engine

    def beat(self) -> None:
        """Say that this process runs, and forget those that have been silent for long."""
        with transaction(self._engine) as session:
            self._upsert(session)
            session.execute(
                delete(ApiProcessRow).where(ApiProcessRow.seen_at < func.now() - _FORGOTTEN)
            )

    def report(
        self,
        promotion_id: str,
        *,
        engine: str | None = None,
        refused: str | None = None,
        transient: bool = False,
    ) -> None:
        """Say that this process serves a promotion, instead of what its alias served; or refuses it."""
        values = {
            "outcome": "served" if refused is None else "refused",
            "engine": engine,
            "why": refused,
            "transient": transient,
            "created_at": func.now(),
        }
        with transaction(self._engine) as session:
            self._upsert(session)
            session.execute(
                insert(ProcessServingRow)
                .values(process=self.name, promotion_id=promotion_id, **values)
                .on_conflict_do_update(index_elements=["process", "promotion_id"], set_=values)
            )
            if refused is None:
                session.execute(
                    delete(ProcessServingRow).where(
                        ProcessServingRow.process == self.name,
                        ProcessServingRow.promotion_id.in_(_formerly_served(promotion_id)),
                    )
                )

    def leave(self) -> None:
        """Say that this process ends."""
        with transaction(self._engine) as session:
            session.execute(delete(ApiProcessRow).where(ApiProcessRow.name == self.name))

    def _upsert(self, session: Session) -> None:
        session.execute(
            insert(ApiProcessRow)
            .values(name=self.name)
            .on_conflict_do_update(index_elements=["name"], set_={"seen_at": func.now()})
        )


def _formerly_served(promotion_id: str) -> Select[str]:
    """Return the ids of the other promotions to the same alias."""
    now = aliased(PromotionRow)
    return select(PromotionRow.id).where(
        now.id == promotion_id,
        PromotionRow.project == now.project,
        PromotionRow.alias == now.alias,
        PromotionRow.id != promotion_id,
    )


def serving_processes(
    session: Session, promotion_ids: Collection[str]
) -> dict[str, list[ProcessServingView]]:
    """Return, by promotion, what each process that runs has made of it."""
    rows = session.execute(
        select(ProcessServingRow)
        .join(ApiProcessRow, ApiProcessRow.name == ProcessServingRow.process)
        .where(
            ProcessServingRow.promotion_id.in_(promotion_ids),
            ApiProcessRow.seen_at > func.now() - _SILENT,
        )
        .order_by(ProcessServingRow.process)
    ).scalars()
    found: dict[str, list[ProcessServingView]] = {}
    for row in rows:
        view = ProcessServingView.model_validate(row, from_attributes=True)
        found.setdefault(row.promotion_id, []).append(view)
    return found
