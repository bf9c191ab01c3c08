"""Deletion in two steps: a row is hidden first, and gone with its files after a grace period.

What refers to a resource refuses its deletion. The check locks the row; whoever makes a new reference
locks it too (`references.lock_dependency`, `model_queries.promote`), so none is overlooked.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

from sqlalchemy import ColumnElement, delete, exists, func, or_, select
from sqlalchemy.orm import Session, aliased

from services.shared.jobs.db.tables import (
    AttemptRow,
    DatasetRow,
    Deletable,
    EventRow,
    JobRow,
    ModelRow,
    PromotionRow,
    ServingRow,
)
from services.shared.jobs.errors import Conflict, InUse, NotFound
from services.shared.jobs.state import TERMINAL, JobState
from services.shared.jobs.views import DeletionView, Resource

_ROWS: dict[Resource, type[Deletable]] = {
    "dataset": DatasetRow,
    "job": JobRow,
    "model": ModelRow,
}
_ACTIVE = sorted(set(JobState) - TERMINAL)


def delete_softly(
    session: Session, resource: Resource, id: str, *, by: str, grace: timedelta
) -> DeletionView:
    """Hide a resource; return when its files go. Repeating it changes nothing.

    Raises NotFound, and InUse with everything that refers to it.
    """
    row = _locked(session, resource, id)
    if row.deleted_at is None:
        references = references_to(session, resource, id)
        if references:
            raise InUse(resource, id, references)
        row.deleted_at, row.deleted_by = session.scalars(select(func.now())).one(), by
        session.flush()
    return _deletion(session, resource, row, grace)


def restore(session: Session, resource: Resource, id: str) -> None:
    """Show a deleted resource again. Raises NotFound, and Conflict where it is not deleted."""
    row = _locked(session, resource, id)
    if row.deleted_at is None:
        raise Conflict(f"{resource.capitalize()} {id} is not deleted.")
    row.deleted_at = row.deleted_by = None
    session.flush()


def references_to(session: Session, resource: Resource, id: str) -> list[str]:
    """Return what refuses the deletion of a resource, each in a few words."""
    return _REFERENCES[resource](session, id)


def _dataset_references(session: Session, id: str) -> list[str]:
    unlabelled = JobRow.spec["distillation"]["unlabelled_dataset_ids"]
    return _active_jobs(session, or_(JobRow.dataset_id == id, unlabelled.contains([id])), "uses it")


def _job_references(session: Session, id: str) -> list[str]:
    state = session.scalars(select(JobRow.state).where(JobRow.id == id)).one()
    if state not in TERMINAL:
        return [f"it is {state}: cancel it first (POST /jobs/{id}/cancel)"]
    return [
        f"job {job_id} ({state}) resumes from its checkpoints"
        for job_id, state in session.execute(
            select(JobRow.id, JobRow.state).where(
                JobRow.id.in_(_retries_of(id)), JobRow.state.in_(_ACTIVE)
            )
        )
    ]


def _model_references(session: Session, id: str) -> list[str]:
    aliases = session.scalars(
        select(PromotionRow.alias)
        .where(PromotionRow.model_id == id, may_serve())
        .group_by(PromotionRow.alias)
        .order_by(PromotionRow.alias)
    )
    needed = or_(
        JobRow.teacher_model_id == id,
        *(JobRow.spec[part]["model_id"].astext == id for part in ("model", "student", "teacher")),
    )
    promoted = [f"alias {alias} serves it: promote another model first" for alias in aliases]
    return promoted + _active_jobs(session, needed, "needs it")


def may_serve() -> ColumnElement[bool]:
    """Return the condition that a promotion serves, or will if those after it are refused."""
    newer = aliased(PromotionRow)
    last = aliased(ServingRow)
    outcome = (
        select(last.outcome)
        .where(last.promotion_id == newer.id)
        .order_by(last.seq.desc())
        .limit(1)
        .scalar_subquery()
    )
    return ~exists().where(
        newer.project == PromotionRow.project,
        newer.alias == PromotionRow.alias,
        newer.seq > PromotionRow.seq,
        outcome == "served",
    )


_REFERENCES: dict[Resource, Callable[[Session, str], list[str]]] = {
    "dataset": _dataset_references,
    "job": _job_references,
    "model": _model_references,
}


def due(
    session: Session, resource: Resource, *, before: datetime, after: str, limit: int
) -> list[str]:
    """Return what was deleted before a moment and is not gone yet, by id after one of them."""
    kind = _ROWS[resource]
    query = select(kind.id).where(
        kind.deleted_at < before, kind.purged_at.is_(None), kind.id > after
    )
    return list(session.scalars(query.order_by(kind.id).limit(limit)))


def purge(session: Session, resource: Resource, id: str, *, before: datetime) -> bool:
    """Mark as gone what was deleted before a moment; return whether its files are to be removed.

    They stay where it was restored meanwhile, or something refers to it: a process of an older version does
    not know that it is deleted.
    """
    kind = _ROWS[resource]
    row = session.scalar(select(kind).where(kind.id == id).with_for_update())
    if row is None or row.deleted_at is None or row.deleted_at >= before:
        return False
    if row.purged_at is None and references_to(session, resource, id):
        return False
    row.purged_at = row.purged_at or session.scalars(select(func.now())).one()
    session.flush()
    return True


def purged_among(session: Session, resource: Resource, ids: list[str]) -> list[str]:
    """Return those whose files are to be gone."""
    kind = _ROWS[resource]
    return list(
        session.scalars(select(kind.id).where(kind.id.in_(ids), kind.purged_at.is_not(None)))
    )


def drop_unreferenced(session: Session, *, limit: int) -> int:
    """Delete the rows of what is gone and nothing refers to any more; return their number.

    A promotion keeps the row of its model, a model that of its job, both that of their dataset.
    """
    other_job, other_model = aliased(JobRow), aliased(ModelRow)
    models = _droppable(
        session,
        ModelRow,
        limit,
        ~exists().where(PromotionRow.model_id == ModelRow.id),
        ~exists().where(other_job.teacher_model_id == ModelRow.id),
        ~exists().where(other_model.teacher_model_id == ModelRow.id),
    )
    session.execute(delete(ModelRow).where(ModelRow.id.in_(models)))
    jobs = _droppable(
        session,
        JobRow,
        limit,
        ~exists().where(other_model.job_id == JobRow.id),
        ~exists().where(or_(other_job.parent_job_id == JobRow.id, other_job.retry_of == JobRow.id)),
    )
    for table in (EventRow, AttemptRow):
        session.execute(delete(table).where(table.job_id.in_(jobs)))
    session.execute(delete(JobRow).where(JobRow.id.in_(jobs)))
    datasets = _droppable(
        session,
        DatasetRow,
        limit,
        ~exists().where(other_job.dataset_id == DatasetRow.id),
        ~exists().where(other_model.dataset_id == DatasetRow.id),
    )
    session.execute(delete(DatasetRow).where(DatasetRow.id.in_(datasets)))
    return len(models) + len(jobs) + len(datasets)


def _droppable(
    session: Session, kind: type[Deletable], limit: int, *conditions: ColumnElement[bool]
) -> list[str]:
    query = select(kind.id).where(kind.purged_at.is_not(None), *conditions).order_by(kind.id)
    return list(session.scalars(query.limit(limit).with_for_update(skip_locked=True)))


def _active_jobs(session: Session, condition: ColumnElement[bool], what: str) -> list[str]:
    rows = session.execute(
        select(JobRow.id, JobRow.state)
        .where(JobRow.state.in_(_ACTIVE), condition)
        .order_by(JobRow.id)
    )
    return [f"job {job_id} ({state}) {what}" for job_id, state in rows]


def _retries_of(job_id: str) -> ColumnElement[str]:
    """Return the jobs that retry a job, and those that retry them."""
    found = select(JobRow.id).where(JobRow.retry_of == job_id).cte("retries", recursive=True)
    again = aliased(JobRow)
    found = found.union(select(again.id).where(again.retry_of == found.c.id))
    return select(found.c.id).scalar_subquery()


def _locked(session: Session, resource: Resource, id: str) -> Deletable:
    kind = _ROWS[resource]
    row = session.scalar(
        select(kind).where(kind.id == id, kind.purged_at.is_(None)).with_for_update()
    )
    if row is None:
        raise NotFound(resource, id)
    return row


def _deletion(
    session: Session, resource: Resource, row: Deletable, grace: timedelta
) -> DeletionView:
    assert row.deleted_at is not None
    assert row.deleted_by is not None
    return DeletionView(
        resource=resource,
        id=row.id,
        deleted_at=row.deleted_at,
        deleted_by=row.deleted_by,
        gone_after=row.deleted_at + grace,
        notes=_notes(session, resource, row.id),
    )


def _notes(session: Session, resource: Resource, id: str) -> list[str]:
    """Return what came from the resource and stays, for information."""
    if resource == "job":
        kept = session.scalars(select(ModelRow.id).where(ModelRow.job_id == id))
        return [f"model {model_id} stays" for model_id in kept]
    column = ModelRow.dataset_id if resource == "dataset" else ModelRow.teacher_model_id
    what = "were trained on it" if resource == "dataset" else "were distilled from it"
    query = select(func.count()).where(column == id, ModelRow.deleted_at.is_(None))
    count = session.scalars(query).one()
    return [f"{count} models {what} and stay"] if count else []
