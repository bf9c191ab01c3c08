"""Maintenance mode: writes are refused with a reason, and workers claim nothing."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from services.api.auth.callers import requires
from services.api.auth.keys import Scope
from services.api.deps import CallerDep, ContextDep
from services.api.limits.body import screen_json
from services.api.openapi import problems
from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.views import MaintenanceView

router = APIRouter(tags=["operations"], responses=problems(401, 403, 422, 429, 500, 503))


class MaintenanceState(BaseModel):
    """Whether maintenance mode is on, and why; `current` is null while it is off."""

    on: bool
    current: MaintenanceView | None


class MaintenanceRequest(BaseModel):
    """Turn maintenance mode on, with a reason that every refused client sees, or off."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"on": False}]}
    )

    on: bool
    reason: Annotated[str, Field(min_length=1, max_length=300)] | None = None


@router.get(
    "/maintenance",
    operation_id="get_maintenance",
    dependencies=[Depends(requires(Scope.READ))],
)
def get_maintenance(context: ContextDep) -> MaintenanceState:
    """Show whether maintenance mode is on."""
    return _state(context.maintenance.current())


@router.post(
    "/maintenance",
    operation_id="set_maintenance",
    dependencies=[Depends(requires(Scope.ADMIN)), Depends(screen_json)],
    responses=problems(400, 413),
)
def set_maintenance(
    body: MaintenanceRequest, context: ContextDep, caller: CallerDep
) -> MaintenanceState:
    """Refuse writes and stop new claims from now on, or end that; running jobs go on."""
    if not body.on:
        context.maintenance.end()
        return _state(None)
    if body.reason is None:
        raise InvalidRequest("reason: required to turn maintenance mode on", field="reason")
    return _state(context.maintenance.start(reason=body.reason, by=caller.name))


def _state(current: MaintenanceView | None) -> MaintenanceState:
    return MaintenanceState(on=current is not None, current=current)
