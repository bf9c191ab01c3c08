"""A whole job written into the books: loading, wrapping, steps, evaluation and export."""

from __future__ import annotations

from collections.abc import Sequence

from services.shared.memory.planning.allocation_tape import rounded
from services.shared.memory.planning.backward import write_backward
from services.shared.memory.planning.forward import write_forward, write_inference
from services.shared.memory.planning.ledger import Books, Phase, Point
from services.shared.memory.planning.optimizer_step import write_update
from services.shared.memory.planning.rank_job import Job, Run
from services.shared.memory.recipe import Engine, Loading, Recipe

# The first step has no optimizer state yet; the second is like all that follow.
STEPS = (1, 2)


def timeline(job: Job, teacher: Job | None = None, *, ends_only: bool) -> list[Point]:
    """Return the points of a job in the order they happen, steps 1 and 2 among them.

    With a `teacher`, its shards lie beside the job all the time, and its forward pass comes before
    each of the job's.
    """
    books = Books()
    run = Run(job, books, ends_only=ends_only)
    if job.recipe.engine is Engine.DDP and job.ranks > 1:
        books.buckets = job.gradient_bytes
    _write_load(run)
    if teacher is not None:
        books.other_model = teacher.parameter_bytes
    beside = None if teacher is None else Run(teacher, books, ends_only=ends_only)
    write_steps(run, steps=STEPS, beside=beside)
    books.enter(Phase.EVALUATION)
    write_inference(run)
    books.enter(Phase.EXPORT)
    _write_export(run)
    return books.points


def write_steps(run: Run, *, steps: Sequence[int], beside: Run | None = None) -> None:
    """Write the given training steps, counted from 1, a teacher's forward pass before each one."""
    books = run.books
    books.parameters = run.job.parameter_bytes
    for step in steps:
        for micro_batch in _micro_batches(run.job.recipe):
            books.enter(Phase.FORWARD, step=step, micro_batch=micro_batch)
            if beside is not None:
                write_inference(beside)
            write_forward(run, first=step == 1 and micro_batch == 0)
            books.enter(Phase.BACKWARD, step=step, micro_batch=micro_batch)
            write_backward(run)
        books.enter(Phase.OPTIMIZER_STEP, step=step)
        write_update(run, first=step == 1)


def _micro_batches(recipe: Recipe) -> list[int]:
    """Return the micro-batches of a step that differ: the first, one between, the last."""
    return sorted({0, min(1, recipe.accumulate - 1), recipe.accumulate - 1})


def _write_load(run: Run) -> None:
    """Write how the shards come to lie on the device."""
    books, job, recipe = run.books, run.job, run.job.recipe
    books.enter(Phase.LOAD)
    largest = max(unit.largest_tensor_elements for unit in job.units.all)
    arriving = largest * recipe.checkpoint.size_bytes if recipe.loading is Loading.RANK0 else 0
    books.parameters = job.parameter_bytes
    if job.fsdp1 and recipe.upcasts:
        books.parameters = 0
    books.mark("all", None, "loaded shards", request_bytes=arriving, temporaries=arriving)
    books.enter(Phase.WRAP)
    if job.fsdp1:
        _write_flattening(run)
    books.parameters = job.parameter_bytes
    if recipe.upcasts:
        kept = rounded(job.units.total("shard_elements") * recipe.checkpoint.size_bytes)
        books.mark("all", None, "shards raised to float32", temporaries=kept)
    else:
        books.mark("all", None, "sharded parameters")


def _write_flattening(run: Run) -> None:
    """FSDP1 wraps unit by unit: parameters on the device, a flat copy of them, a shard of that."""
    books, job, recipe = run.books, run.job, run.job.recipe
    width = recipe.checkpoint.size_bytes if recipe.upcasts else recipe.parameters.size_bytes
    units = [*job.units.layers, *([job.units.embedding] if job.units.embedding else ())]
    books.parameters = 0
    for unit in (*units, job.units.root):
        whole, shard = rounded(width * unit.elements), rounded(width * unit.shard_elements)
        books.mark(
            unit.name,
            None,
            f"flat parameter of one {unit.name}",
            request_bytes=whole,
            unsharded=2 * whole,
            temporaries=shard,
        )
        books.parameters += shard


def _write_export(run: Run) -> None:
    """One parameter at a time: each rank's part in the compute dtype, on its way to rank 0."""
    books, job = run.books, run.job
    largest = max(unit.largest_piece_elements for unit in job.units.all)
    part = rounded(largest * job.recipe.compute.size_bytes)
    books.mark("all", None, "part of one parameter", request_bytes=part, temporaries=part)
