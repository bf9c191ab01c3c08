"""Memory plans: whether a job fits, and what would make it fit, before anything is stored."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends

from services.api.body import screen_json
from services.api.deps import PartsDep
from services.api.keys import requires
from services.api.openapi import problems
from services.api.routes.jobs import SpecBody
from services.shared.jobs.errors import DoesNotFit, InvalidInput

router = APIRouter(
    tags=["plans"],
    dependencies=[Depends(requires(None)), Depends(screen_json)],
    responses=problems(400, 401, 413, 422, 500, 503),
)


@router.post("/jobs/plan", operation_id="plan_job")
def plan_job(spec: SpecBody, parts: PartsDep) -> dict[str, Any]:
    """Plan a job's memory and store nothing. A job that does not fit has a plan too."""
    try:
        plan = parts.admit(spec).plan
    except DoesNotFit as refusal:
        return refusal.plan
    if plan is None:
        raise InvalidInput(
            "There is nothing to plan with: the shape of the model is not known before its job runs."
        )
    return plan
