"""`stillhouse plan`: the memory of a training job on each rank, and what would make it fit."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from services.cli.plan_request import PlanRequest, takes_plan_options
from services.cli.views.plan import show_plan
from services.shared.memory.planning.alternatives import Alternative, alternatives, refused_by_host
from services.shared.memory.planning.plan import Plan
from services.shared.memory.planning.plan import plan as plan_job
from services.shared.memory.planning.plan_contract import Verdict


@takes_plan_options
def plan(
    request: PlanRequest,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for machines.")] = False,
) -> None:
    """Compute the memory of a job before it runs: the peak of each rank, by phase and component."""
    planned, offered, refused = _plan(request)
    if as_json:
        documents = [[a.to_dict() for a in some] for some in (offered, refused)]
        typer.echo(json.dumps(planned.to_dict(*documents), indent=2))
        return
    show_plan(Console(), planned, offered, refused)


def _plan(request: PlanRequest) -> tuple[Plan, tuple[Alternative, ...], tuple[Alternative, ...]]:
    """Return the plan, the alternatives where it does not fit well, and what the host refuses."""
    shape, recipe, hardware = request.shape, request.recipe, request.hardware
    teacher = request.teacher
    planned = plan_job(shape, recipe, hardware, teacher=teacher)
    if planned.runs and planned.verdict is Verdict.FITS:
        return planned, (), ()
    offered = alternatives(shape, recipe, hardware, teacher=teacher)
    return planned, offered, refused_by_host(shape, recipe, hardware, teacher=teacher)
