"""Models and promotions in the database."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from sqlalchemy import func, insert, select, update
from sqlalchemy.orm import Session

from services.shared.jobs.db import audit
from services.shared.jobs.db.audit import AuditEntry
from services.shared.jobs.db.pagination import checked_limit, cursor_seq, shown
from services.shared.jobs.db.processes import serving_processes
from services.shared.jobs.db.tables import JobRow, ModelRow, PromotionRow, ServingRow
from services.shared.jobs.errors import Conflict, GateNotPassed, InvalidRequest, NotFound
from services.shared.jobs.gates import GateFloor, Int8Gate, evaluate_gate
from services.shared.jobs.ids import model_id_of, new_id
from services.shared.jobs.projects import Access
from services.shared.jobs.run_directory import Report
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import DistillSpec, job_spec
from services.shared.jobs.views import Kind, ModelView, Page, PromotionView, ServingView

DEFAULT_ALIAS = "default"
SERVER = "server"  # who acted in the audit log, where no key is known
_ALIAS = re.compile(r"[a-z][a-z0-9_-]{0,63}")


def add(session: Session, job: JobRow, report: Report, *, floor: GateFloor) -> None:
    """Register the model of a job that has just succeeded; promote it if its spec requests that and its gate passed."""
    spec = job_spec.validate_python(job.spec)
    gate = None
    if isinstance(spec, DistillSpec):
        gate = evaluate_gate(spec.gate, report.evaluation, floor=floor)
    model_id = model_id_of(job.id, job.attempt)
    session.execute(
        insert(ModelRow).values(
            id=model_id,
            job_id=job.id,
            project=job.project,
            kind=job.kind,
            name=job.name,
            dataset_id=job.dataset_id,
            teacher_model_id=job.teacher_model_id,
            heads=report.heads,
            parameters=report.parameters,
            size_bytes=report.size_bytes,
            manifest_sha256=report.manifest_sha256,
            metrics=report.evaluation,
            gate=None if gate is None else gate.model_dump(mode="json"),
        )
    )
    if isinstance(spec, DistillSpec) and spec.promote == "when_passed" and gate and gate.passed:
        access = Access(project=job.project, actor=job.created_by)
        _append(session, model_id, DEFAULT_ALIAS, access=access, forced=False, reason=gate.message)
        entry = AuditEntry(
            key_name=job.created_by or SERVER,
            project=job.project,
            action="promote_model",
            target=model_id,
            outcome="done",
            detail=f"requested by job {job.id}",
        )
        audit.append(session, entry)


def view(session: Session, model_id: str, *, settings: JobSettings) -> ModelView:
    """Return a model by its id or by the id of the job that made it.

    Raises NotFound, and Conflict for a job that has made no model.
    """
    row = session.scalar(
        select(ModelRow).where((ModelRow.id == model_id) | (ModelRow.job_id == model_id))
    )
    if row is not None and row.purged_at is None:
        return _views(session, [row], settings)[0]
    if row is not None:
        raise NotFound("model", model_id)
    state = session.scalar(select(JobRow.state).where(JobRow.id == model_id))
    if state is None:
        raise NotFound("model", model_id)
    raise Conflict(f"Job {model_id} is {state}; only a job that succeeded has a model.")


def list_page(
    session: Session,
    *,
    kind: Kind | None,
    deleted: bool,
    cursor: str | None,
    limit: int,
    settings: JobSettings,
) -> Page[ModelView]:
    """Return models, newest job first."""
    query = select(ModelRow).where(*shown(ModelRow, deleted=deleted)).order_by(ModelRow.id.desc())
    if kind is not None:
        query = query.where(ModelRow.kind == kind)
    if cursor is not None:
        query = query.where(ModelRow.id < cursor)
    rows = session.scalars(query.limit(checked_limit(limit) + 1)).all()
    items = _views(session, rows[:limit], settings)
    return Page(items=items, next_cursor=items[-1].id if len(rows) > limit else None)


def promote(
    session: Session,
    model: ModelView,
    *,
    alias: str,
    force: bool,
    reason: str | None,
    actor: str | None,
) -> PromotionView:
    """Append a promotion in the model's project; raises InvalidRequest, GateNotPassed."""
    if not _ALIAS.fullmatch(alias):
        raise InvalidRequest(
            f"alias: {alias[:80]!r} is no alias; use a-z, 0-9, _ and -, a letter first, 64 at most",
            field="alias",
        )
    if force and not (reason and reason.strip()):
        raise InvalidRequest(
            "reason: required with `force`: why the gate is overridden", field="reason"
        )
    if model.gate is not None and not model.gate.passed and not force:
        raise GateNotPassed(model.id, model.gate.message)
    _lock_for_promotion(session, model.id)
    access = Access(project=model.project, actor=actor)
    return _append(session, model.id, alias, access=access, forced=force, reason=reason)


def _lock_for_promotion(session: Session, model_id: str) -> None:
    """Lock a model against deletion. Raises Conflict for a deleted one."""
    query = select(ModelRow.id).where(ModelRow.id == model_id, ModelRow.deleted_at.is_(None))
    if session.scalar(query.with_for_update(read=True)) is None:
        raise Conflict(f"Model {model_id} is deleted: restore it before it is promoted.")


def promotions(
    session: Session, *, alias: str | None, cursor: str | None, limit: int
) -> Page[PromotionView]:
    """Return promotions, newest first."""
    query = select(PromotionRow).order_by(PromotionRow.seq.desc())
    if alias is not None:
        query = query.where(PromotionRow.alias == alias)
    before = cursor_seq(cursor)
    if before is not None:
        query = query.where(PromotionRow.seq < before)
    rows = session.scalars(query.limit(checked_limit(limit) + 1)).all()
    items = _promotion_views(session, rows[:limit])
    return Page(items=items, next_cursor=str(items[-1].seq) if len(rows) > limit else None)


def active(session: Session, alias: str, *, project: str) -> PromotionView | None:
    """Return the promotion that an alias of a project serves, or None before the first."""
    row = session.scalar(
        select(PromotionRow)
        .where(PromotionRow.project == project, PromotionRow.alias == alias)
        .order_by(PromotionRow.seq.desc())
        .limit(1)
    )
    return None if row is None else _promotion_views(session, [row])[0]


def set_int8_gate(session: Session, model_id: str, gate: Int8Gate) -> None:
    """Store the latest 8-bit decision and its figures with the model."""
    values = {"int8_gate": gate.model_dump(mode="json")}
    session.execute(update(ModelRow).where(ModelRow.id == model_id).values(values))


def record_serving(
    session: Session,
    promotion_id: str,
    *,
    engine: str | None = None,
    refused: str | None = None,
    transient: bool = False,
) -> None:
    """Append whether the API serves a promotion, unless its newest record says the same.

    Every API process reports at each start and each retry; only changes are stored. A second refusal
    for lack of memory, with other numbers, is not a change.
    """
    last = newest_serving(session, [promotion_id]).get(promotion_id)
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


def newest_serving(session: Session, promotion_ids: Collection[str]) -> dict[str, ServingView]:
    """Return the newest serving record of each promotion that has one."""
    last = (
        select(func.max(ServingRow.seq))
        .where(ServingRow.promotion_id.in_(promotion_ids))
        .group_by(ServingRow.promotion_id)
    )
    rows = session.scalars(select(ServingRow).where(ServingRow.seq.in_(last))).all()
    processes = serving_processes(session, [row.promotion_id for row in rows])
    names = [name for name in ServingView.model_fields if name != "processes"]
    return {
        row.promotion_id: ServingView(
            **{name: getattr(row, name) for name in names},
            processes=processes.get(row.promotion_id, []),
        )
        for row in rows
    }


def serving_by_model(
    session: Session, model_ids: Sequence[str]
) -> dict[str, dict[str, ServingView]]:
    """Return, by model and alias, the newest serving record of the model's newest promotion to the alias."""
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
    known = newest_serving(session, [promotion_id for _, _, promotion_id in promotions])
    found: dict[str, dict[str, ServingView]] = {model_id: {} for model_id in model_ids}
    for model_id, alias, promotion_id in promotions:
        if promotion_id in known:
            found[model_id][alias] = known[promotion_id]
    return found


def _append(
    session: Session,
    model_id: str,
    alias: str,
    *,
    access: Access,
    forced: bool,
    reason: str | None,
) -> PromotionView:
    row = session.scalars(
        insert(PromotionRow)
        .values(
            id=new_id("prm"),
            project=access.project,
            alias=alias,
            model_id=model_id,
            forced=forced,
            reason=reason,
            promoted_by=access.actor,
        )
        .returning(PromotionRow)
    ).one()
    return _promotion_views(session, [row])[0]


def _views(session: Session, rows: Sequence[ModelRow], settings: JobSettings) -> list[ModelView]:
    serving = serving_by_model(session, [row.id for row in rows])
    elsewhere = {"path", "serving"}
    names = [name for name in ModelView.model_fields if name not in elsewhere]
    return [
        ModelView(
            **{name: getattr(row, name) for name in names},
            serving=serving[row.id],
            path=settings.model_dir(row.id),
        )
        for row in rows
    ]


def _promotion_views(session: Session, rows: Sequence[PromotionRow]) -> list[PromotionView]:
    serving = newest_serving(session, [row.id for row in rows])
    names = [name for name in PromotionView.model_fields if name != "serving"]
    return [
        PromotionView(**{name: getattr(row, name) for name in names}, serving=serving.get(row.id))
        for row in rows
    ]
