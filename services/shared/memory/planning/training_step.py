"""Simulates a whole job: loading, wrapping, steps, evaluation and export."""

from __future__ import annotations

from collections.abc import Sequence

from services.shared.memory.planning.allocation_tape import rounded
from services.shared.memory.planning.backward import record_backward
from services.shared.memory.planning.forward import record_forward, record_inference
from services.shared.memory.planning.ledger import MemoryLedger, PlanPhase, Point
from services.shared.memory.planning.optimizer_step import record_update
from services.shared.memory.planning.rank_job import RankJob, SimulationRun
from services.shared.memory.recipe import Engine, Loading, Recipe

# The first step has no optimizer state yet; the second is like all that follow.
STEPS = (1, 2)


def timeline(job: RankJob, teacher: RankJob | None = None, *, ends_only: bool) -> list[Point]:
    """Return the points of a job in the order they happen, steps 1 and 2 among them.

    With a `teacher`, its parameters stay on the device, and its forward pass precedes each of the
    job's.
    """
    ledger = MemoryLedger()
    run = SimulationRun(job, ledger, ends_only=ends_only)
    if job.recipe.engine is Engine.DDP and job.ranks > 1:
        ledger.buckets = job.gradient_bytes
    _record_load(run)
    if teacher is not None:
        ledger.other_model = teacher.parameter_bytes
    teacher_run = None if teacher is None else SimulationRun(teacher, ledger, ends_only=ends_only)
    record_steps(run, steps=STEPS, teacher=teacher_run)
    ledger.enter(PlanPhase.EVALUATION)
    record_inference(run)
    ledger.enter(PlanPhase.EXPORT)
    _record_export(run)
    return ledger.points


def record_steps(
    run: SimulationRun, *, steps: Sequence[int], teacher: SimulationRun | None = None
) -> None:
    """Record training `steps`, counted from 1, each forward pass after one of the teacher's."""
    ledger = run.ledger
    ledger.parameters = run.job.parameter_bytes
    for step in steps:
        for micro_batch in _micro_batches(run.job.recipe):
            ledger.enter(PlanPhase.FORWARD, step=step, micro_batch=micro_batch)
            if teacher is not None:
                record_inference(teacher)
            record_forward(run, first=step == 1 and micro_batch == 0)
            ledger.enter(PlanPhase.BACKWARD, step=step, micro_batch=micro_batch)
            record_backward(run)
        ledger.enter(PlanPhase.OPTIMIZER_STEP, step=step)
        record_update(run, first=step == 1)


def _micro_batches(recipe: Recipe) -> list[int]:
    """Return the micro-batches of a step that differ: the first, the second, the last."""
    return sorted({0, min(1, recipe.accumulate - 1), recipe.accumulate - 1})


def _record_load(run: SimulationRun) -> None:
    """Record the loading and wrapping of the model."""
    ledger, job, recipe = run.ledger, run.job, run.job.recipe
    ledger.enter(PlanPhase.LOAD)
    largest = max(unit.largest_tensor_elements for unit in job.units.all)
    transferred = largest * recipe.checkpoint.size_bytes if recipe.loading is Loading.RANK0 else 0
    ledger.parameters = job.parameter_bytes
    if job.fsdp1 and recipe.upcasts:
        ledger.parameters = 0
    ledger.record("all", None, "loaded shards", request_bytes=transferred, temporaries=transferred)
    ledger.enter(PlanPhase.WRAP)
    if job.fsdp1:
        _record_flattening(run)
    ledger.parameters = job.parameter_bytes
    if recipe.upcasts:
        kept = rounded(job.units.total("shard_elements") * recipe.checkpoint.size_bytes)
        ledger.record("all", None, "shards raised to float32", temporaries=kept)
    else:
        ledger.record("all", None, "sharded parameters")


def _record_flattening(run: SimulationRun) -> None:
    """Record FSDP1's wrapping, unit by unit: parameters on the device, a flat copy, a shard of it."""
    ledger, job, recipe = run.ledger, run.job, run.job.recipe
    width = recipe.checkpoint.size_bytes if recipe.upcasts else recipe.parameters.size_bytes
    units = [*job.units.layers, *([job.units.embedding] if job.units.embedding else ())]
    ledger.parameters = 0
    for unit in (*units, job.units.root):
        whole, shard = rounded(width * unit.elements), rounded(width * unit.shard_elements)
        ledger.record(
            unit.name,
            None,
            f"flat parameter of one {unit.name}",
            request_bytes=whole,
            unsharded=2 * whole,
            temporaries=shard,
        )
        ledger.parameters += shard


def _record_export(run: SimulationRun) -> None:
    """Record the export: one parameter at a time, each rank's shard in the compute dtype."""
    ledger, job = run.ledger, run.job
    largest = max(unit.largest_local_shard_elements for unit in job.units.all)
    part = rounded(largest * job.recipe.compute.size_bytes)
    ledger.record("all", None, "part of one parameter", request_bytes=part, temporaries=part)
