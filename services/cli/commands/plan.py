"""`stillhouse plan`: the memory of a training job on each rank, and what would make it fit."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from services.cli.plan_request import PlanRequest, takes_plan_options
from services.cli.terminal import Console
from services.cli.views.capacity import show_capacity
from services.cli.views.plan import show_plan
from services.shared.memory.architecture.shape import from_preset, preset_names
from services.shared.memory.errors import InvalidInput
from services.shared.memory.planning.alternatives import Alternative, alternatives, refused_by_host
from services.shared.memory.planning.capacity import fewest_ranks, largest_models, to_dict
from services.shared.memory.planning.layers import PLANNED_FAMILIES
from services.shared.memory.planning.plan import Plan
from services.shared.memory.planning.plan import plan as plan_job
from services.shared.memory.planning.plan_contract import Verdict


@takes_plan_options
def plan(
    request: PlanRequest,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for machines.")] = False,
    cards_needed: Annotated[
        bool,
        typer.Option("--cards-needed", help="The fewest devices that hold the model, instead."),
    ] = False,
    largest_model: Annotated[
        bool,
        typer.Option("--largest-model", help="The largest preset that the devices hold, instead."),
    ] = False,
    devices_per_node: Annotated[
        int, typer.Option(min=1, max=64, help="For --cards-needed: how many nodes that is.")
    ] = 8,
) -> None:
    """Compute the memory of a job before it runs: the peak of each rank, by phase and component."""
    if cards_needed and largest_model:
        raise InvalidInput("largest_model", "asks another question than --cards-needed")
    if cards_needed or largest_model:
        if request.teacher is not None:
            raise InvalidInput("teacher", "is not counted by --cards-needed and --largest-model")
        fits = _fewest(request) if cards_needed else _largest(request)
        if as_json:
            found = [to_dict(fit, devices_per_node=devices_per_node) for fit in fits]
            typer.echo(json.dumps(found, indent=2))
        else:
            show_capacity(Console(), fits, devices_per_node=devices_per_node)
        return
    planned, offered, refused = _plan(request)
    if as_json:
        documents = [[a.to_dict() for a in some] for some in (offered, refused)]
        typer.echo(json.dumps(planned.to_dict(*documents), indent=2))
        return
    show_plan(Console(), planned, offered, refused)


def _fewest(request: PlanRequest) -> list[Alternative]:
    fits = fewest_ranks(request.shape, request.recipe, request.hardware)
    if not fits:
        raise InvalidInput(
            "model", f"no number of {request.hardware.device.name} up to 1024 holds it"
        )
    return fits


def _largest(request: PlanRequest) -> list[Alternative]:
    classes = request.shape.heads
    shapes = [from_preset(name, heads=classes) for name in preset_names()]
    planned = [shape for shape in shapes if shape.dims.family in PLANNED_FAMILIES]
    fits = [fit for _, fit in largest_models(planned, request.recipe, request.hardware)]
    if not fits:
        raise InvalidInput("ranks", "no known model fits these devices")
    return fits


def _plan(request: PlanRequest) -> tuple[Plan, tuple[Alternative, ...], tuple[Alternative, ...]]:
    """Return the plan, the alternatives where it does not fit well, and what the host refuses."""
    shape, recipe, hardware = request.shape, request.recipe, request.hardware
    teacher = request.teacher
    planned = plan_job(shape, recipe, hardware, teacher=teacher)
    if planned.runs and planned.verdict is Verdict.FITS:
        return planned, (), ()
    offered = alternatives(shape, recipe, hardware, teacher=teacher)
    return planned, offered, refused_by_host(shape, recipe, hardware, teacher=teacher)
