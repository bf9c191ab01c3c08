"""Memory plans: whether a job fits, and what would make it fit, before anything is stored."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends

from services.api.auth.keys import requires
from services.api.deps import AppContext, ContextDep
from services.api.limits.body import screen_json
from services.api.openapi import problems
from services.api.routes.jobs import RequestBody
from services.shared.jobs.errors import DoesNotFit, InvalidInput, prefix_field
from services.shared.jobs.spec import ChainSpec, DistillSpec, TeacherSpec

router = APIRouter(
    tags=["plans"],
    dependencies=[Depends(requires(None)), Depends(screen_json)],
    responses=problems(400, 401, 413, 422, 429, 500, 503),
)


@router.post("/jobs/plan", operation_id="plan_job")
def plan_job(body: RequestBody, context: ContextDep) -> dict[str, Any]:
    """Plan a job's memory and store nothing. A job that does not fit has a plan too.

    A chain has two: `{"teacher": {...}, "distill": {...}}`.
    """
    if not isinstance(body, ChainSpec):
        return _plan(body, context)
    teacher = body.teacher_spec()
    with prefix_field("teacher"):
        first = _plan(teacher, context)
    with prefix_field("distill"):
        second = _plan(body.distill_spec(), context, teacher=teacher)
    return {"teacher": first, "distill": second}


def _plan(
    spec: TeacherSpec | DistillSpec, context: AppContext, *, teacher: TeacherSpec | None = None
) -> dict[str, Any]:
    try:
        admitted = context.admit(spec, teacher=teacher)
    except DoesNotFit as refusal:
        return refusal.plan
    if admitted.plan is None:
        why = admitted.unplanned
        assert why is not None
        raise InvalidInput(f"{why.field}: nothing can be planned: {why.why}", field=why.field)
    return admitted.plan
