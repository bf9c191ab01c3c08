"""`stillhouse trace`: a dry run of the training step, compared with its plan."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypedDict

import typer
from typing_extensions import NotRequired

from services.cli.plan_request import PlanRequest, takes_plan_options
from services.cli.terminal import Console, printable
from services.cli.views.trace import TraceDict, show_trace
from services.shared.jobs.planning.spec_to_plan import as_run_by_ranks, to_spec_recipe
from services.shared.memory.architecture.hf_config import config_of
from services.shared.memory.architecture.pooling import CONFIG_KEY, Pooling
from services.shared.memory.architecture.safetensors_headers import read_json
from services.shared.memory.architecture.shape import Shape
from services.shared.memory.errors import InvalidInput
from services.shared.memory.hardware import machine
from services.shared.memory.planning.ledger import PlanPhase
from services.shared.memory.planning.plan import Plan, plan
from services.shared.memory.recipe import Offload

_MODULE = "services.shared.training.dry_run.trace"
# Without a head there is no loss: a head of two classes, where the options name none.
_DEFAULT_HEADS = (2,)


class TraceRequestDict(TypedDict):
    """The request of a traced process; see `training.dry_run.trace.TraceRequest`."""

    config: dict[str, Any]  # a user's config.json
    heads: list[int]
    recipe: dict[str, Any]  # `jobs.spec.Recipe`
    engine: str
    ranks: int
    micro_batch: int
    sequence_length: int
    accumulate: int
    padded: bool
    teacher: NotRequired[dict[str, Any]]
    teacher_heads: NotRequired[list[int]]
    teacher_placement: NotRequired[str]


class Row(NamedTuple):
    """The traced and the planned peak of one phase; planned is 0 where the plan has none."""

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
        typer.Option(
            "--real", help="Run it with values, on gloo ranks of this machine: small models."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON, for machines.")] = False,
) -> None:
    """Run a job's first two steps on fake tensors, and compare their memory with the plan."""
    job, planned = prepare(request)
    found = _run(job, real=real)
    rows = compare(found, planned)
    if as_json:
        document = dict(found) | {
            "rows": [row._asdict() | {"error": row.error} for row in rows],
            "planned_peak_bytes": planned.peak_bytes,
            "budget_bytes": request.hardware.budget_bytes,
            "recipe": planned.recipe.to_dict(),
        }
        typer.echo(json.dumps(document, indent=2))
        return
    show_trace(
        Console(markup=True), found, rows, planned, budget_bytes=request.hardware.budget_bytes
    )


def prepare(request: PlanRequest) -> tuple[TraceRequestDict, Plan]:
    """Return the request of the traced process, and the plan of the same run.

    Raises InvalidInput for what the ranks cannot do, or a dry run cannot show.
    """
    _check(request)
    shape, teacher = _with_heads(request.shape), request.teacher
    padded = request.recipe.attention_mask and request.recipe.micro_batch > 1
    recipe = as_run_by_ranks(request.recipe, shape, padded=padded, on_cpu=True)
    # A dry run takes the kernels of a CPU, and so does its plan.
    cpu = machine("cpu", ranks=request.hardware.ranks)
    job: TraceRequestDict = {
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
    if teacher is None:
        return job, plan(shape, recipe, cpu)
    assert request.teacher_model is not None
    teacher_shape = _with_heads(teacher.shape)
    mask = as_run_by_ranks(recipe, teacher_shape, padded=padded).attention_mask
    teacher = replace(teacher, shape=teacher_shape, attention_mask=mask)
    job["teacher"] = _config(request.teacher_model, teacher_shape)
    job["teacher_heads"] = list(teacher_shape.heads)
    job["teacher_placement"] = str(teacher.placement)
    return job, plan(shape, recipe, cpu, teacher=teacher)


def compare(found: TraceDict, planned: Plan) -> list[Row]:
    """Return the phases of a trace with the peaks of its plan."""
    peaks: dict[tuple[str, int, int], int] = {}
    for point in planned.points:
        place = (str(point.phase), point.step, point.micro_batch)
        peaks[place] = max(peaks.get(place, 0), point.live_bytes)
    rows = []
    for entry in found["phases"]:
        phase, step, micro_batch = entry["phase"], entry["step"], entry["micro_batch"]
        planned_step = (
            0 if phase == PlanPhase.EVALUATION else step
        )  # the plan's evaluation belongs to no step
        rows.append(
            Row(
                phase,
                step,
                micro_batch,
                entry["peak_bytes"],
                # The trace loads the teacher after wrapping; the plan loads before.
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
        raise InvalidInput("reduce_each", "the trainer reduces every micro-batch")


def _with_heads(shape: Shape) -> Shape:
    return shape if shape.heads else shape.with_heads(_DEFAULT_HEADS)


def _config(named: str, shape: Shape) -> dict[str, Any]:
    """Return the transformers config of the model that an option named."""
    path = Path(named)
    if path.is_dir():
        path /= "config.json"
    elif path.name.endswith((".safetensors", ".safetensors.index.json")):
        path = path.parent / "config.json"
    config = dict(read_json(path)) if path.is_file() else config_of(shape.dims)
    if shape.dims.mean_pooling:
        config[CONFIG_KEY] = Pooling.MEAN.config_value
    return config


def _run(job: TraceRequestDict, *, real: bool) -> TraceDict:
    """Run the traced process, which loads torch; this one does not."""
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
        typer.echo(printable(done.stderr[-4000:]), err=True)
        raise typer.Exit(1)
    found: TraceDict = json.loads(done.stdout.splitlines()[-1])
    return found
