"""Records the optimizer step in the ledger: state as it is created, and the update's temporaries."""

from __future__ import annotations

from collections.abc import Sequence

from services.shared.memory.planning.allocation_tape import rounded
from services.shared.memory.planning.rank_job import SimulationRun
from services.shared.memory.planning.sharding_units import UnitSizes, moments_bytes
from services.shared.memory.recipe import Optimizer, OptimizerImpl, Recipe

# Live float32 and integer temporaries, in bytes an element by the width of parameters, at the worst
# moment of the update of one shard or chunk of it; counted by a dry run of services/shared/training/
# {adamw_bf16,adamw_8bit,adamw_split,adafactor}.py.
_UPDATE_BYTES = {
    Optimizer.ADAMW_BF16: {4: 31, 2: 31},
    Optimizer.ADAMW_8BIT: {4: 16, 2: 27},
    Optimizer.ADAMW_SPLIT: {2: 20},
    Optimizer.ADAMW_SPLIT24: {2: 29},
    Optimizer.ADAFACTOR: {4: 12, 2: 21},
}
# `chunk_elements` in the same files: temporaries do not grow beyond them.
_CHUNK_ELEMENTS = {
    Optimizer.ADAMW_BF16: 16 * 2**20,
    Optimizer.ADAMW_8BIT: 4 * 2**20,
    Optimizer.ADAMW_SPLIT: 4 * 2**20,
    Optimizer.ADAMW_SPLIT24: 4 * 2**20,
}


def record_update(run: SimulationRun, *, first: bool) -> None:
    """Record the update of all parameters, unless each was updated in backward."""
    ledger, job = run.ledger, run.job
    if job.recipe.optimizer_in_backward or not job.state_on_device:
        ledger.optimizer, ledger.gradients = job.state_bytes, 0
        return
    if not run.ends_only and job.recipe.optimizer in _TORCH_ADAMW:
        _record_tensor_by_tensor(run, first=first)
    if first and job.recipe.optimizer in _CHUNK_ELEMENTS:
        _record_first_small(run)
    else:
        ledger.optimizer = job.state_bytes
        largest = max(unit.largest_local_shard_elements for unit in job.units.all)
        ledger.record(
            "all",
            None,
            "optimizer update",
            request_bytes=rounded(largest * job.recipe.parameters.size_bytes),
            temporaries=update_temporaries(job.recipe, job.units.all),
        )
    ledger.optimizer, ledger.gradients = job.state_bytes, 0


def _record_first_small(run: SimulationRun) -> None:
    """Record the peak of the first update of an optimizer with small moments.

    State is created shard by shard, so the temporaries of a large early shard coincide with little of it.
    """
    ledger, recipe = run.ledger, run.job.recipe
    state, most = 0, (0, 0, 0, "")
    for name, count in run.job.local_shards:
        state += moments_bytes(count, recipe.optimizer, recipe.parameters.size_bytes)
        needed = _shard_temporaries(recipe, count)
        most = max(most, (state + needed, state, needed, name))
    _, ledger.optimizer, needed, name = most
    ledger.record("all", None, f"update of {name}", request_bytes=needed, temporaries=needed)


def update_temporaries(recipe: Recipe, units: Sequence[UnitSizes]) -> int:
    """Return the bytes that one update of `units` allocates temporarily."""
    p = recipe.parameters.size_bytes
    largest = max(unit.largest_local_shard_elements for unit in units)
    if recipe.optimizer in _UPDATE_BYTES:
        return _shard_temporaries(recipe, largest)
    if recipe.optimizer is Optimizer.SGD or recipe.optimizer_impl is OptimizerImpl.FUSED:
        return 0
    if recipe.optimizer_impl is OptimizerImpl.FOREACH:
        # torch/optim/adamw.py: the square roots of all second moments at once.
        return sum(unit.parameter_bytes for unit in units)
    return 2 * rounded(p * largest)


def _shard_temporaries(recipe: Recipe, count: int) -> int:
    chunk = min(count, _CHUNK_ELEMENTS.get(recipe.optimizer, count))
    return _UPDATE_BYTES[recipe.optimizer][recipe.parameters.size_bytes] * chunk


# State and temporaries of these are created in the order of the parameters.
_TORCH_ADAMW = frozenset({Optimizer.ADAMW})


def _record_tensor_by_tensor(run: SimulationRun, *, first: bool) -> None:
    """Record AdamW's two moments as they are created, then foreach's square roots."""
    ledger, job, width = run.ledger, run.job, run.job.recipe.parameters.size_bytes
    sizes = [(name, rounded(width * count)) for name, count in job.local_shards]
    if first:
        ledger.optimizer = 0
        for name, size in sizes:
            for moment in ("exp_avg", "exp_avg_sq"):
                ledger.optimizer += size
                ledger.record("all", None, f"{moment} of {name}", request_bytes=size)
    ledger.optimizer = job.state_bytes
    if job.recipe.optimizer_impl is OptimizerImpl.FOREACH:
        roots = 0
        for name, size in sizes:
            roots += size
            what = f"square root for {name}"
            ledger.record("all", None, what, request_bytes=size, temporaries=roots)
