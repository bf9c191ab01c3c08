"""Jobs that repeat others: a new job, and those that had waited for the old one in vain."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError
from sqlalchemy import exists, select
from sqlalchemy.orm import Session, aliased

from services.shared.jobs.db.job_queries import create, get
from services.shared.jobs.db.tables import JobRow
from services.shared.jobs.errors import InvalidInput, InvalidTransition
from services.shared.jobs.planning.spec_to_plan import split_changes
from services.shared.jobs.spec import DistillSpec, Recipe, TeacherSource, TeacherSpec, job_spec
from services.shared.jobs.state import JobState, Reason
from services.shared.memory.planning.alternatives import TEACHER_PLACEMENT

_UNSUCCESSFUL = (JobState.FAILED, JobState.CANCELLED)


def retry(
    session: Session,
    job_id: str,
    *,
    recipe_changes: dict[str, Any],
    training_changes: dict[str, Any],
    plan: dict[str, Any] | None,
    idempotency_key: str | None,
) -> tuple[str, bool]:
    """Insert a new job that repeats a failed or cancelled one; return its id, and if it is new.

    The distillations that failed with it are inserted anew as well, and wait for the new job.
    Raises NotFound, InvalidTransition for any other state, InvalidInput naming a wrong change.
    """
    old = get(session, job_id, lock=True)
    if old.state not in (JobState.FAILED, JobState.CANCELLED):
        raise InvalidTransition(job_id, old.state, JobState.QUEUED)
    spec = changed_spec(
        job_spec.validate_python(old.spec),
        recipe=old.recipe,
        recipe_changes=recipe_changes,
        training_changes=training_changes,
    )
    _, own = split_changes(recipe_changes)
    recipe = Recipe.model_validate(old.recipe | own)
    new, created = create(
        session,
        spec,
        plan=plan,
        recipe=recipe,
        idempotency_key=idempotency_key,
        retry_of=job_id,
    )
    if created:
        _retry_children(session, job_id, new_parent_id=new)
    return new, created


def changed_spec(
    spec: TeacherSpec | DistillSpec,
    *,
    recipe: dict[str, Any],
    recipe_changes: dict[str, Any],
    training_changes: dict[str, Any],
) -> TeacherSpec | DistillSpec:
    """Return the spec with changes applied to `recipe` (the one last used) and to its training.

    Among `recipe_changes` may be a distillation's `teacher_placement`, as in a remedy.

    Raises InvalidInput naming the field that does not exist or has no such value.
    """
    whole = spec.model_dump(mode="json")
    placement, own = split_changes(recipe_changes)
    if placement is not None:
        if not isinstance(spec, DistillSpec):
            raise InvalidInput(
                f"{TEACHER_PLACEMENT}: only a distillation has a teacher", field=TEACHER_PLACEMENT
            )
        whole["distillation"][TEACHER_PLACEMENT] = placement
    if own:
        whole["recipe"] = recipe | own
    whole["training"] = whole["training"] | training_changes
    try:
        return job_spec.validate_python(whole)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:] if part != "Recipe")
        raise InvalidInput(f"{field}: {first['msg']}", field=field) from error


def _retry_children(session: Session, parent_id: str, *, new_parent_id: str) -> None:
    """Insert anew the jobs that failed with a job, and their own children with them.

    One that has been inserted anew before is left alone, unless that failed or was cancelled too.
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
        )
        _retry_children(session, child.id, new_parent_id=new)
