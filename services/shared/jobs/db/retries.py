"""Retries: a new job that repeats another, and the children that had failed with it."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import exists, select
from sqlalchemy.orm import Session, aliased

from services.shared.jobs.db.job_queries import create, get
from services.shared.jobs.db.tables import JobRow
from services.shared.jobs.documents import JobPlanDict
from services.shared.jobs.errors import Conflict, InvalidTransition
from services.shared.jobs.planning.spec_changes import ChangedSpec
from services.shared.jobs.projects import Access
from services.shared.jobs.spec import DistillSpec, Recipe, TeacherSource, job_spec
from services.shared.jobs.state import JobState, Reason

_UNSUCCESSFUL = (JobState.FAILED, JobState.CANCELLED)


def retry(
    session: Session,
    job_id: str,
    changed: ChangedSpec,
    *,
    plan: JobPlanDict | None,
    access: Access,
    idempotency_key: str | None,
) -> tuple[str, bool]:
    """Insert a new job that repeats a failed or cancelled one in its project; return its id, and if it is new.

    The distillations that failed with it are repeated as well, and wait for the new job.
    Raises NotFound, InvalidTransition for any other state.
    """
    old = get(session, job_id, lock=True)
    if old.deleted_at is not None:
        raise Conflict(f"Job {job_id} is deleted: restore it before it is retried.")
    if old.state not in _UNSUCCESSFUL:
        raise InvalidTransition(job_id, old.state, JobState.QUEUED)
    access = replace(access, project=old.project)
    new, created = create(
        session,
        changed.spec,
        access=access,
        plan=plan,
        recipe=changed.recipe,
        idempotency_key=idempotency_key,
        retry_of=job_id,
    )
    if created:
        _retry_children(session, job_id, new_parent_id=new, access=access)
    return new, created


def _retry_children(
    session: Session, parent_id: str, *, new_parent_id: str, access: Access
) -> None:
    """Repeat the jobs that failed with a job, and their own children.

    A child that has been repeated before is skipped, unless that retry failed or was cancelled too.
    """
    again = aliased(JobRow)
    children = session.scalars(
        select(JobRow)
        .where(
            JobRow.parent_job_id == parent_id,
            JobRow.state == JobState.FAILED,
            JobRow.reason == Reason.PARENT_FAILED,
            ~exists().where(again.retry_of == JobRow.id, again.state.not_in(_UNSUCCESSFUL)),
        )
        .order_by(JobRow.id)
    ).all()
    for child in children:
        spec = job_spec.validate_python(child.spec)
        assert isinstance(spec, DistillSpec)
        new, _ = create(
            session,
            spec.model_copy(update={"teacher": TeacherSource(job_id=new_parent_id)}),
            plan=child.plan,
            recipe=Recipe.model_validate(child.recipe),
            retry_of=child.id,
            access=access,
        )
        _retry_children(session, child.id, new_parent_id=new, access=access)
