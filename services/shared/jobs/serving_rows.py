"""What the API made of promotions, in the database."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import func, insert, select
from sqlalchemy.orm import Session

from services.shared.jobs.tables import PromotionRow, ServingRow
from services.shared.jobs.views import ServingView


def add(
    session: Session,
    promotion_id: str,
    *,
    engine: str | None = None,
    refused: str | None = None,
    transient: bool = False,
) -> None:
    """Append what became of a promotion, unless the last word on it is the same.

    Every API process says what it sees, at each start and each further try: only news are kept. What
    is refused again for the same lack of memory, with other numbers, is none.
    """
    last = newest(session, [promotion_id]).get(promotion_id)
    outcome = "served" if refused is None else "refused"
    if last and (last.outcome, last.engine, last.transient) == (outcome, engine, transient):
        return
    session.execute(
        insert(ServingRow).values(
            promotion_id=promotion_id,
            outcome=outcome,
            engine=engine,
            why=refused,
            transient=transient,
        )
    )


def newest(session: Session, promotion_ids: Collection[str]) -> dict[str, ServingView]:
    """Return the last word on each promotion of which there is one."""
    last = (
        select(func.max(ServingRow.seq))
        .where(ServingRow.promotion_id.in_(promotion_ids))
        .group_by(ServingRow.promotion_id)
    )
    rows = session.scalars(select(ServingRow).where(ServingRow.seq.in_(last)))
    return {row.promotion_id: ServingView.model_validate(row, from_attributes=True) for row in rows}


def of_models(session: Session, model_ids: Sequence[str]) -> dict[str, dict[str, ServingView]]:
    """Return, by model and alias, the last word on the newest promotion of the model to the alias."""
    last = (
        select(func.max(PromotionRow.seq))
        .where(PromotionRow.model_id.in_(model_ids))
        .group_by(PromotionRow.model_id, PromotionRow.alias)
    )
    promotions = session.execute(
        select(PromotionRow.model_id, PromotionRow.alias, PromotionRow.id).where(
            PromotionRow.seq.in_(last)
        )
    ).all()
    known = newest(session, [promotion_id for _, _, promotion_id in promotions])
    found: dict[str, dict[str, ServingView]] = {model_id: {} for model_id in model_ids}
    for model_id, alias, promotion_id in promotions:
        if promotion_id in known:
            found[model_id][alias] = known[promotion_id]
    return found
