"""Queries of jobs: create, read, list, cancel."""

from __future__ import annotations

import hashlib
import json

from sqlalchemy import ColumnElement, func, or_, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from services.shared.jobs.db import usage_queries
from services.shared.jobs.db.pagination import LARGEST_SEQ, checked_limit, shown
from services.shared.jobs.db.references import Dependency, lock_dependency
from services.shared.jobs.db.tables import AttemptRow, EventRow, JobRow, ModelRow
from services.shared.jobs.db.transitions import ColumnValues, append_state_event, transition
from services.shared.jobs.documents import JobPlanDict
from services.shared.jobs.errors import InvalidRequest, InvalidTransition, NotFound, prefix_field
from services.shared.jobs.ids import new_id
from services.shared.jobs.planning.plan_vs_measured import PlannedPhases, compare_phases
from services.shared.jobs.projects import DEFAULT_PROJECT, Access
from services.shared.jobs.resolved_spec import PlannedSpec
from services.shared.jobs.spec import ChainSpec, DistillSpec, Recipe, TeacherSpec
from services.shared.jobs.state import JobState, Reason
from services.shared.jobs.views import (
    AttemptView,
    EventView,
    JobChanges,
    JobCounts,
    JobSummary,
    JobView,
    Kind,
    Page,
    PlanError,
    QueuedJob,
)

_MAX_KEY_LENGTH = 255
_SUMMARY = [getattr(JobRow, name) for name in JobSummary.model_fields]


def create(
    session: Session,
    spec: TeacherSpec | DistillSpec,
    *,
    plan: JobPlanDict | None,
    access: Access,
    recipe: Recipe | None = None,
    idempotency_key: str | None = None,
    retry_of: str | None = None,
    request: ChainSpec | None = None,
) -> tuple[str, bool]:
    """Insert a job of the access's project unless its key is known; return its id and whether it is new.

    `request` is the chain that the job is a part of.
    """
    sha256 = _digest(request or spec, retry_of=retry_of)
    if idempotency_key is not None:
        idempotency_key = _qualified_key(idempotency_key, access.project)
        known = _by_key(session, idempotency_key, sha256)
        if known is not None:
            return known, False
    usage_queries.check_storage(session, access)
    usage_queries.check_queue(session, access)
    with prefix_field(None if request is None else spec.kind):
        dependency = lock_dependency(session, spec)
    job_id = session.execute(
        insert(JobRow)
        .values(
            id=new_id("job"),
            plan=plan,
            recipe=(recipe or _own_recipe(spec)).model_dump(mode="json"),
            idempotency_key=idempotency_key,
            spec_sha256=sha256,
            retry_of=retry_of,
            project=access.project,
            created_by=access.actor,
            running_quota=access.quota.running_jobs,
            **_columns(spec, dependency),
        )
        .on_conflict_do_nothing(index_elements=[JobRow.idempotency_key])
        .returning(JobRow.id)
    ).scalar_one_or_none()
    if job_id is None:  # another request with the same key committed meanwhile
        assert idempotency_key is not None
        known = _by_key(session, idempotency_key, sha256)
        assert known is not None
        return known, False
    append_state_event(session, job_id, dependency.state, attempt=0)
    return job_id, True


def create_chain(
    session: Session,
    chain: ChainSpec,
    *,
    teacher: PlannedSpec,
    distill: PlannedSpec,
    access: Access,
    idempotency_key: str | None = None,
) -> tuple[str, bool]:
    """Insert both jobs of a chain unless its key is known; return the teacher's id, and if it is new."""
    teacher_id, created = create(
        session,
        chain.teacher_spec(),
        plan=teacher.plan,
        recipe=teacher.recipe,
        access=access,
        idempotency_key=idempotency_key,
        request=chain,
    )
    if created:
        create(
            session,
            chain.distill_spec(teacher_id),
            plan=distill.plan,
            recipe=distill.recipe,
            request=chain,
            access=access,
        )
    return teacher_id, created


def view(session: Session, job_id: str) -> JobView:
    """Return a job with its attempts; raises NotFound."""
    row = get(session, job_id)
    if row.purged_at is not None:
        raise NotFound("job", job_id)
    model_id = session.scalar(select(ModelRow.id).where(ModelRow.job_id == job_id))
    children = session.scalars(
        select(JobRow.id).where(JobRow.parent_job_id == job_id).order_by(JobRow.id)
    )
    known = {name: getattr(row, name) for name in JobView.model_fields if hasattr(row, name)}
    return JobView(
        **known,
        model_id=model_id,
        child_job_ids=list(children),
        attempts=_attempts(session, job_id),
    )


def list_page(
    session: Session,
    *,
    state: JobState | None,
    kind: Kind | None,
    search: str | None,
    created_by: str | None,
    deleted: bool,
    cursor: str | None,
    limit: int,
) -> Page[JobSummary]:
    """Return jobs, newest first; `search` is a part of their names or ids."""
    query = select(*_SUMMARY).where(*shown(JobRow, deleted=deleted)).order_by(JobRow.id.desc())
    if state is not None:
        query = query.where(JobRow.state == state)
    if kind is not None:
        query = query.where(JobRow.kind == kind)
    if created_by is not None:
        query = query.where(JobRow.created_by == created_by)
    if search is not None:
        query = query.where(
            JobRow.name.icontains(search, autoescape=True)
            | JobRow.id.contains(search, autoescape=True)
        )
    if cursor is not None:
        query = query.where(JobRow.id < cursor)
    rows = session.execute(query.limit(checked_limit(limit) + 1)).mappings().all()
    items = [JobSummary.model_validate(dict(row)) for row in rows[:limit]]
    return Page(items=items, next_cursor=items[-1].id if len(rows) > limit else None)


def changes(session: Session, *, after_seq: int | None, limit: int) -> JobChanges:
    """Return the jobs with events after one of them, and those that run; for None only the latter."""
    newest = session.scalar(select(func.max(EventRow.seq))) or 0
    wanted: list[ColumnElement[bool]] = [JobRow.state.in_((JobState.RUNNING, JobState.CANCELLING))]
    if after_seq is not None:
        after_seq = max(0, min(after_seq, LARGEST_SEQ))
        changed = select(EventRow.job_id).where(EventRow.seq > after_seq)
        wanted.append(JobRow.id.in_(changed))
    query = select(*_SUMMARY).where(*shown(JobRow, deleted=False)).where(or_(*wanted))
    rows = session.execute(
        query.order_by(JobRow.id.desc()).limit(checked_limit(limit) + 1)
    ).mappings()
    items = [JobSummary.model_validate(dict(row)) for row in rows]
    return JobChanges(last_seq=newest, is_complete=len(items) <= limit, items=items[:limit])


def counts(session: Session) -> list[JobCounts]:
    """Return how many jobs of each kind wait, are queued or run."""
    rows = session.execute(
        select(JobRow.kind, JobRow.state, func.count())
        .where(
            *shown(JobRow, deleted=False),
            JobRow.state.in_(
                (JobState.WAITING, JobState.QUEUED, JobState.RUNNING, JobState.CANCELLING)
            ),
        )
        .group_by(JobRow.kind, JobRow.state)
        .order_by(JobRow.kind, JobRow.state)
    )
    return [JobCounts(kind=kind, state=JobState(state), jobs=jobs) for kind, state, jobs in rows]


def events(session: Session, job_id: str, *, after_seq: int, limit: int) -> list[EventView]:
    """Return events of a job in order; raises NotFound for an unknown job."""
    get(session, job_id)  # an event itself belongs to no project
    after_seq = max(0, min(after_seq, LARGEST_SEQ))
    rows = session.scalars(
        select(EventRow)
        .where(EventRow.job_id == job_id, EventRow.seq > after_seq)
        .order_by(EventRow.seq)
        .limit(checked_limit(limit))
    ).all()
    return [EventView.model_validate(row, from_attributes=True) for row in rows]


def attempts(session: Session, job_id: str) -> list[AttemptView]:
    """Return the attempts of a job in order; raises NotFound for an unknown job."""
    get(session, job_id)
    return _attempts(session, job_id)


def plan_errors(session: Session, *, limit: int) -> list[PlanError]:
    """Return how far the plans of the last succeeded jobs were off, phase by phase.

    Of several ranks the one that is furthest off counts. Phases in which the probe could not count
    what the plan counts are left out.
    """
    rows = session.execute(
        select(
            JobRow.spec["resources"]["device"].astext,
            JobRow.plan["phases"],
            JobRow.plan["teacher_placement"],
            JobRow.plan["recipe"]["engine"],
            JobRow.measured,
            JobRow.observed,
        )
        .where(JobRow.state == JobState.SUCCEEDED, JobRow.plan.is_not(None))
        .order_by(JobRow.id.desc())
        .limit(limit)
    )
    found = []
    for device, phases, placement, engine, measured, observed in rows:
        planned = PlannedPhases(phases or {}, engine, placement)
        worst: dict[str, float] = {}
        for rank in compare_phases(planned, measured, observed).values():
            for phase, memory in rank.phases.items():
                if memory.error_ratio is not None:
                    worst[phase] = max(worst.get(phase, 0.0), memory.error_ratio, key=abs)
        found += [PlanError(device, phase, ratio) for phase, ratio in worst.items()]
    return found


def request_cancel(session: Session, job_id: str) -> None:
    """Cancel a job at once, or request it of its worker; raises NotFound, InvalidTransition."""
    state = JobState(get(session, job_id, lock=True).state)
    if state in (JobState.CANCELLING, JobState.CANCELLED):
        return
    if state is JobState.RUNNING:
        transition(session, job_id, JobState.CANCELLING)
        return
    if not transition(
        session,
        job_id,
        JobState.CANCELLED,
        reason=Reason.CANCELLED,
        message="Cancelled before it started.",
    ):
        raise InvalidTransition(job_id, state, JobState.CANCELLED)
    release_children(session, job_id)


def release_children(session: Session, job_id: str) -> list[QueuedJob]:
    """Release or fail the jobs that wait for a job which has just ended; return those to be sent.

    The children of a child that fails fail with it.
    """
    parent = get(session, job_id)
    model_id = session.scalar(select(ModelRow.id).where(ModelRow.job_id == job_id))
    waiting = session.execute(
        select(JobRow.id, JobRow.kind)
        .where(JobRow.parent_job_id == job_id, JobRow.state == JobState.WAITING)
        .order_by(JobRow.id)
    ).all()
    to_send: list[QueuedJob] = []
    for child_id, kind in waiting:
        if model_id is not None:
            if transition(session, child_id, JobState.QUEUED, teacher_model_id=model_id):
                to_send.append(QueuedJob(child_id, kind))
            continue
        message = f"Its teacher job {job_id} is {parent.state}: {parent.message}"
        if transition(
            session, child_id, JobState.FAILED, reason=Reason.PARENT_FAILED, message=message
        ):
            release_children(session, child_id)
    return to_send


def get(session: Session, job_id: str, *, lock: bool = False) -> JobRow:
    """Return the current row of a job; raises NotFound."""
    query = select(JobRow).where(JobRow.id == job_id).execution_options(populate_existing=True)
    row = session.scalar(query.with_for_update() if lock else query)
    if row is None:
        raise NotFound("job", job_id)
    return row


def _attempts(session: Session, job_id: str) -> list[AttemptView]:
    rows = session.scalars(
        select(AttemptRow).where(AttemptRow.job_id == job_id).order_by(AttemptRow.number)
    )
    return [AttemptView.model_validate(row, from_attributes=True) for row in rows]


def _qualified_key(key: str, project: str) -> str:
    """Return an idempotency key as it is stored: unique among all projects, as the column requires.

    A key has no spaces. Raises InvalidRequest for one of an impossible length.
    """
    if not 1 <= len(key) <= _MAX_KEY_LENGTH:
        raise InvalidRequest(
            f"Idempotency-Key: {len(key)} characters; give 1 to {_MAX_KEY_LENGTH}",
            field="Idempotency-Key",
        )
    return key if project == DEFAULT_PROJECT else f"{project} {key}"


def _by_key(session: Session, key: str, sha256: str) -> str | None:
    known = session.execute(
        select(JobRow.id, JobRow.spec_sha256).where(JobRow.idempotency_key == key)
    ).one_or_none()
    if known is not None and known.spec_sha256 != sha256:
        raise InvalidRequest(
            f"Idempotency-Key: the key has been used for another request (job {known.id})",
            field="Idempotency-Key",
        )
    return None if known is None else known.id


def _digest(request: TeacherSpec | DistillSpec | ChainSpec, *, retry_of: str | None) -> str:
    document = request.model_dump(mode="json") | ({"retry_of": retry_of} if retry_of else {})
    for part in (document, document.get("teacher"), document.get("distill")):
        if part and part.get("priority") == 0:  # a default that the digests of older jobs lack
            del part["priority"]
    text = json.dumps(document, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _own_recipe(spec: TeacherSpec | DistillSpec) -> Recipe:
    return Recipe() if spec.recipe == "auto" else spec.recipe


def _columns(spec: TeacherSpec | DistillSpec, dependency: Dependency) -> ColumnValues:
    return {
        "kind": spec.kind,
        "name": spec.name,
        "spec": spec.model_dump(mode="json"),
        "dataset_id": spec.dataset_id,
        "max_attempts": spec.max_attempts,
        "priority": spec.priority,
        "state": dependency.state,
        "parent_job_id": dependency.parent_job_id,
        "teacher_model_id": dependency.teacher_model_id,
        "sent_at": func.now() if dependency.state is JobState.QUEUED else None,
    }
