"""`stillhouse trace`: a dry run of our own training step, beside what the plan says of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from services.cli.plan_request import PlanRequest, takes_plan_options
from services.cli.views.trace import show_trace
from services.shared.jobs.planning.spec_to_plan import as_run_by_ranks, to_spec_recipe
from services.shared.memory.architecture.hf_config import config_of
from services.shared.memory.architecture.safetensors_headers import read_json
from services.shared.memory.architecture.shape import Shape
from services.shared.memory.errors import InvalidInput
from services.shared.memory.hardware import machine
from services.shared.memory.planning.ledger import PlanPhase
from services.shared.memory.planning.plan import Plan, plan, plan_distillation
from services.shared.memory.recipe import Offload

_MODULE = "services.shared.training.dry_run.trace"
# A head of two classes where none was asked for: without a head there is no loss.
_LEAST_HEADS = (2,)


class Row(NamedTuple):
    """One phase of a trace, and what the plan says of it; 0 where it says nothing."""

    phase: str
    step: int
    micro_batch: int
    traced_bytes: int
    planned_bytes: int
    request: str
    request_bytes: int

    @property
    def error(self) -> float | None:
        """Relative error of the plan."""
        return self.planned_bytes / self.traced_bytes - 1 if self.planned_bytes else None


@takes_plan_options
def trace(
    request: PlanRequest,
    *,
    real: Annotated[
        bool,
        typer.Option("--real", help="Really run it, on gloo ranks of this machine: small models."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for machines.")] = False,
) -> None:
    """Run a job's first two steps without the memory, and count what they would really take."""
    job, planned = prepare(request)
    found = _run(job, real=real)
    rows = compare(found, planned)
    if as_json:
        document = found | {
            "rows": [row._asdict() | {"error": row.error} for row in rows],
            "planned_peak_bytes": planned.peak_bytes,
            "budget_bytes": request.hardware.budget_bytes,
            "recipe": planned.recipe.to_dict(),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    show_trace(Console(), found, rows, planned, budget_bytes=request.hardware.budget_bytes)


def prepare(request: PlanRequest) -> tuple[dict[str, Any], Plan]:
    """Return what the traced process is asked (its TraceRequest), and the plan of the same run.

    Raises InvalidInput for what our ranks cannot do, or a dry run cannot see.
    """
    _check(request)
    shape, beside = _headed(request.shape), request.beside
    padded = request.recipe.attention_mask and request.recipe.micro_batch > 1
    recipe = as_run_by_ranks(request.recipe, shape, padded=padded, on_cpu=True)
    # A dry run takes the kernels of a CPU, and so does its plan.
    cpu = machine("cpu", ranks=request.hardware.ranks)
    job = {
        "config": _config(request.model, shape),
        "heads": list(shape.heads),
        "recipe": to_spec_recipe(recipe).model_dump(mode="json"),
        "engine": str(recipe.engine),
        "ranks": cpu.ranks,
        "micro_batch": recipe.micro_batch,
        "sequence_length": recipe.sequence_length,
        "accumulate": recipe.accumulate,
        "padded": padded,
    }
    if beside is None:
        return job, plan(shape, recipe, cpu)
    assert request.teacher is not None
    teacher = _headed(beside.shape)
    beside = replace(
        beside,
        shape=teacher,
        masked=as_run_by_ranks(recipe, teacher, padded=padded).attention_mask,
    )
    job |= {
        "teacher": _config(request.teacher, teacher),
        "teacher_heads": list(teacher.heads),
        "teacher_placement": str(beside.placement),
    }
    return job, plan_distillation(beside, shape, cpu, student_recipe=recipe)


def compare(found: Mapping[str, Any], planned: Plan) -> list[Row]:
    """Return the phases of a trace (Trace as JSON) beside the peaks of the plan."""
    peaks: dict[tuple[str, int, int], int] = {}
    for point in planned.points:
        place = (str(point.phase), point.step, point.micro_batch)
        peaks[place] = max(peaks.get(place, 0), point.live_bytes)
    rows = []
    for entry in found["phases"]:
        phase, step, micro_batch = entry["phase"], entry["step"], entry["micro_batch"]
        planned_step = 0 if phase == PlanPhase.EVALUATION else step  # the plan has one of no step
        rows.append(
            Row(
                phase,
                step,
                micro_batch,
                entry["peak_bytes"],
                # The teacher is loaded after wrapping, but the plan's loading comes before.
                0 if phase == PlanPhase.LOAD else peaks.get((phase, planned_step, micro_batch), 0),
                entry["request"],
                entry["request_bytes"],
            )
        )
    return rows


def _check(request: PlanRequest) -> None:
    recipe = request.recipe
    if recipe.offload is not Offload.NONE:
        raise InvalidInput(
            "offload", "on a CPU there is no other device to offload to", accepted="none"
        )
    if recipe.accumulate > 1 and not recipe.reduce_each:
        raise InvalidInput("reduce_each", "our ranks reduce every micro-batch")


def _headed(shape: Shape) -> Shape:
    return shape if shape.heads else shape.with_heads(_LEAST_HEADS)


def _config(named: str, shape: Shape) -> dict[str, Any]:
    """Return the transformers config of a model as an option named it."""
    path = Path(named)
    if path.is_dir():
        path /= "config.json"
    elif path.name.endswith((".safetensors", ".safetensors.index.json")):
        path = path.parent / "config.json"
    return dict(read_json(path)) if path.is_file() else config_of(shape.dims)


def _run(job: Mapping[str, Any], *, real: bool) -> dict[str, Any]:
    """Run the traced process; it loads torch, this one does not."""
    command = [sys.executable, "-m"]
    if real:
        command += ["torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(job["ranks"]), "-m"]
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "request.json"
        file.write_text(json.dumps(job), encoding="utf-8")
        command += [_MODULE, str(file), *(["--real"] if real else [])]
        done = subprocess.run(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        typer.echo(done.stderr[-4000:], err=True)
        raise typer.Exit(1)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
