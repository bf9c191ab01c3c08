"""`stillhouse plan`: what a training job takes on each rank, and what would make it fit."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from services.cli.plan_request import PlanRequest, takes_plan_options
from services.cli.views.plan import show_plan
from services.shared.memory.planning.alternatives import Alternative, alternatives, refused_by_host
from services.shared.memory.planning.plan import Plan, Verdict, plan_distillation
from services.shared.memory.planning.plan import plan as plan_job


@takes_plan_options
def plan(
    request: PlanRequest,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for machines.")] = False,
) -> None:
    """Compute what a job takes before it runs: the peak on each rank, by phase and by component."""
    planned, offered, refused = _plan(request)
    if as_json:
        documents = [[a.to_dict() for a in some] for some in (offered, refused)]
        typer.echo(json.dumps(planned.to_dict(*documents), indent=2))
        return
    show_plan(Console(), planned, offered, refused)


def _plan(request: PlanRequest) -> tuple[Plan, tuple[Alternative, ...], tuple[Alternative, ...]]:
    """Return the plan, what would fit if it does not comfortably, and what the host refuses."""
    shape, recipe, hardware = request.shape, request.recipe, request.hardware
    teacher = request.beside
    if teacher is None:
        planned = plan_job(shape, recipe, hardware)
    else:
        planned = plan_distillation(teacher, shape, hardware, student_recipe=recipe)
    if planned.runs and planned.verdict is Verdict.FITS:
        return planned, (), ()
    offered = alternatives(shape, recipe, hardware, teacher=teacher)
    return planned, offered, refused_by_host(shape, recipe, hardware, teacher=teacher)
