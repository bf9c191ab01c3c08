"""The optimizer step written into the books: state as it is created, and what the update needs."""

from __future__ import annotations

from collections.abc import Sequence

from services.shared.memory.recipe import Optimizer, OptimizerImpl, Recipe
from services.shared.memory.run import Run
from services.shared.memory.sharding import UnitSizes
from services.shared.memory.tape import rounded

# Live float32 and integer temporaries, in bytes an element, at the worst moment of the update of one
# piece; counted by a dry run of services/shared/fsdp/{adamw_bf16,adafactor}.py.
_ADAMW_BF16_BYTES = 31
_ADAFACTOR_BYTES = {4: 12, 2: 21}
_BF16_CHUNK_ELEMENTS = 16 * 2**20  # services/shared/fsdp/adamw_bf16.py: CHUNK_ELEMENTS
# Both moments, parameter and gradient in float32 while 8-bit blocks are taken apart and put
# together again (torchao's low-bit AdamW, uncompiled); estimated from its source, not traced.
_ADAMW_8BIT_BYTES = 16


def write_update(run: Run, *, first: bool) -> None:
    """Write the update of all parameters, unless each was updated in backward."""
    books, job = run.books, run.job
    if job.recipe.optimizer_in_backward or not job.state_on_device:
        books.optimizer, books.gradients = job.state_bytes, 0
        return
    if not run.ends_only and job.recipe.optimizer in _TORCH_ADAMW:
        _write_tensor_by_tensor(run, first=first)
    if first and job.recipe.optimizer is Optimizer.ADAMW_BF16:
        _write_first_bf16(run)
    else:
        books.optimizer = job.state_bytes
        largest = max(unit.largest_piece_elements for unit in job.units.all)
        books.mark(
            "all",
            None,
            "optimizer update",
            request_bytes=rounded(largest * job.recipe.parameters.size_bytes),
            temporaries=update_temporaries(job.recipe, job.units.all),
        )
    books.optimizer, books.gradients = job.state_bytes, 0


def _write_first_bf16(run: Run) -> None:
    """Write the moment of a first update in bfloat16 that takes most.

    State comes piece by piece, so the temporaries of a large early piece lie beside little of it.
    """
    books = run.books
    state, most = 0, (0, 0, 0, "")
    for name, count in run.job.pieces:
        state += 2 * rounded(2 * count)
        needed = _ADAMW_BF16_BYTES * min(count, _BF16_CHUNK_ELEMENTS)
        most = max(most, (state + needed, state, needed, name))
    _, books.optimizer, needed, name = most
    books.mark("all", None, f"update of {name}", request_bytes=needed, temporaries=needed)


def update_temporaries(recipe: Recipe, units: Sequence[UnitSizes]) -> int:
    """Return the bytes that the update of `units` together allocates for a moment."""
    p = recipe.parameters.size_bytes
    largest = max(unit.largest_piece_elements for unit in units)
    if recipe.optimizer is Optimizer.ADAMW_BF16:
        return _ADAMW_BF16_BYTES * min(largest, _BF16_CHUNK_ELEMENTS)
    if recipe.optimizer is Optimizer.ADAFACTOR:
        return _ADAFACTOR_BYTES[p] * largest
    if recipe.optimizer is Optimizer.ADAMW_8BIT:
        return _ADAMW_8BIT_BYTES * largest
    if recipe.optimizer is Optimizer.SGD or recipe.optimizer_impl is OptimizerImpl.FUSED:
        return 0
    if recipe.optimizer_impl is OptimizerImpl.FOREACH:
        # torch/optim/adamw.py: the square roots of all second moments at once.
        return sum(unit.parameter_bytes for unit in units)
    return 2 * rounded(p * largest)


# State and temporaries of these are created in the order of the parameters.
_TORCH_ADAMW = frozenset({Optimizer.ADAMW})


def _write_tensor_by_tensor(run: Run, *, first: bool) -> None:
    """Write AdamW's two moments as they are created, then foreach's square roots as they are."""
    books, job, width = run.books, run.job, run.job.recipe.parameters.size_bytes
    sizes = [(name, rounded(width * count)) for name, count in job.pieces]
    if first:
        books.optimizer = 0
        for name, size in sizes:
            for moment in ("exp_avg", "exp_avg_sq"):
                books.optimizer += size
                books.mark("all", None, f"{moment} of {name}", request_bytes=size)
    books.optimizer = job.state_bytes
    if job.recipe.optimizer_impl is OptimizerImpl.FOREACH:
        roots = 0
        for name, size in sizes:
            roots += size
            what = f"square root for {name}"
            books.mark("all", None, what, request_bytes=size, temporaries=roots)
