"""Memory plans: whether a job fits, and what would make it fit, before anything is stored."""

from __future__ import annotations

from typing import TypedDict

from fastapi import APIRouter, Depends

from services.api.auth.callers import requires
from services.api.auth.keys import Scope
from services.api.deps import Admission, CallerDep, ContextDep
from services.api.limits.body import screen_json
from services.api.openapi import problems
from services.api.routes.jobs import RequestBody
from services.shared.jobs.document_schema import StoredDocument
from services.shared.jobs.documents import JobPlanDict
from services.shared.jobs.errors import DoesNotFit, InvalidRequest, prefix_field
from services.shared.jobs.resolved_spec import ResolvedSpec
from services.shared.jobs.spec import ChainSpec

router = APIRouter(
    tags=["plans"],
    dependencies=[Depends(requires(Scope.READ)), Depends(screen_json)],
    responses=problems(400, 401, 413, 422, 429, 500, 503),
)


class ChainPlanDict(TypedDict):
    """The memory plans of the two jobs of a chain."""

    teacher: JobPlanDict
    distill: JobPlanDict


@router.post("/jobs/plan", operation_id="plan_job")
def plan_job(
    body: RequestBody, context: ContextDep, caller: CallerDep
) -> StoredDocument[JobPlanDict | ChainPlanDict]:
    """Plan a job's memory and store nothing. A job that does not fit has a plan too.

    A chain has two: `{"teacher": {...}, "distill": {...}}`.
    """
    admission, project = context.admission, caller.project
    if not isinstance(body, ChainSpec):
        return _plan(admission.resolve(body, project=project), admission)
    with prefix_field("teacher"):
        teacher = admission.resolve(body.teacher_spec(), project=project)
        first = _plan(teacher, admission)
    with prefix_field("distill"):
        distill = admission.resolve(body.distill_spec(), project=project, chained=teacher)
        return {"teacher": first, "distill": _plan(distill, admission)}


def _plan(resolved: ResolvedSpec, admission: Admission) -> JobPlanDict:
    try:
        planned = admission.plan(resolved)
    except DoesNotFit as refusal:
        return refusal.plan
    if planned.plan is None:
        unplanned = planned.unplanned
        assert unplanned is not None
        raise InvalidRequest(
            f"{unplanned.field}: nothing can be planned: {unplanned.why}", field=unplanned.field
        )
    return planned.plan
