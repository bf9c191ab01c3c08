"""Records a backward pass in the ledger, from the last layer to the root."""

from __future__ import annotations

from services.shared.memory.planning.allocation_tape import rounded
from services.shared.memory.planning.optimizer_step import update_temporaries
from services.shared.memory.planning.rank_job import SimulationRun
from services.shared.memory.planning.sharding_units import UnitSizes
from services.shared.memory.recipe import Engine, Prefetch


def record_backward(run: SimulationRun) -> None:
    """Record the backward pass of the ledger's micro-batch; reduced gradients stay afterwards."""
    ledger, job = run.ledger, run.job
    base = ledger.activations - run.saved_before(job.num_layers)
    if not job.recipe.activation_checkpointing:
        # Only a recomputed layer needs the mask again.
        base -= job.mask_bytes
    ledger.activations = base + run.saved_at(job.num_layers - 1)
    _record_gradient_bytes(run, job.num_layers)
    _enter_root(run)
    for index in reversed(run.indices()):
        ledger.activations = base + run.saved_at(index)
        _record_gradient_bytes(run, index + 1)
        _layer(run, index, after=base + run.saved_after(index))
    ledger.activations = 0
    _record_gradient_bytes(run, 0)
    ledger.unsharded = job.units.root.unsharded_parameter_bytes
    embedding = job.units.embedding
    if embedding is not None:
        _embedding(run, embedding)
    _root(run)
    _finish(run)


def _enter_root(run: SimulationRun) -> None:
    """Record what precedes the last layer: the root's own gather, the final norm, the heads."""
    ledger, job, root = run.ledger, run.job, run.job.units.root
    if job.regathers_root:
        ledger.unsharded -= root.unsharded_parameter_bytes
        ledger.record(
            "root",
            None,
            "gathered root",
            request_bytes=root.gathered_bytes,
            unsharded=root.unsharded_parameter_bytes,
            communication=root.gathered_bytes,
            temporaries=job.final.saved_bytes,
        )
        ledger.unsharded += root.unsharded_parameter_bytes
    ahead = _gathered_ahead(run, job.num_layers) if job.layered else 0
    ledger.record_tape("root", None, job.final.backward, communication=ahead)


def _reduces(run: SimulationRun) -> bool:
    """Return whether gradients are reduced in this micro-batch, not kept unsharded for the last one."""
    recipe = run.job.recipe
    return recipe.reduce_each or run.ledger.micro_batch == recipe.accumulate - 1


def _accumulates_separately(run: SimulationRun) -> bool:
    """Return whether unsharded gradients of earlier micro-batches are alive."""
    return run.ledger.micro_batch > 0 and not run.job.recipe.reduce_each


def _record_gradient_bytes(run: SimulationRun, left: int) -> None:
    """Set the gradients that are alive when `left` layers have still to run backward."""
    ledger, job, recipe, units = run.ledger, run.job, run.job.recipe, run.job.units
    first, last = ledger.micro_batch == 0, ledger.micro_batch == recipe.accumulate - 1
    whole_root = units.root.accumulated_gradient_bytes
    if job.layered:
        ledger.communication = sum(_all_reduced_bytes(run, unit) for unit in units.layers[left:])
    reduced = units.layers_from("gradient_bytes", left) if job.on_device else 0
    done = job.gradients_below[-1] - job.gradients_below[left]
    ledger.unsharded_gradients = 0 if job.layered else done
    if not recipe.reduce_each and recipe.accumulate > 1:
        embedding = units.embedding
        others = whole_root + (embedding.accumulated_gradient_bytes if embedding else 0)
        ledger.gradients = reduced if last else 0
        if job.layered:
            ledger.unsharded_gradients = _waiting_gradients(run, left) + (0 if first else others)
        elif not first:
            new = 0 if recipe.accumulates_in_place else ledger.unsharded_gradients
            ledger.unsharded_gradients = whole_root + new
    elif recipe.optimizer_in_backward and last:
        ledger.gradients = 0 if first else job.gradient_bytes - reduced
        if ledger.step == 1 and job.state_on_device and job.layered:
            ledger.optimizer = units.layers_from("optimizer_bytes", left)
    else:
        ledger.gradients = reduced if first else job.gradient_bytes


def _waiting_gradients(run: SimulationRun, left: int) -> int:
    """Return the bytes of the layers' unsharded gradients that wait for the last micro-batch."""
    ledger, below = run.ledger, run.job.accumulated_below
    if ledger.micro_batch == run.job.recipe.accumulate - 1:
        return below[left]
    return below[-1] - below[left] if ledger.micro_batch == 0 else below[-1]


def _all_reduced_bytes(run: SimulationRun, unit: UnitSizes) -> int:
    """Return the bytes of a unit's all-reduce over replicas, which FSDP2 keeps to the end of backward
    (AllReduceState).

    Without a cast it is the gradient itself, and outlives that only if it is applied at once.
    """
    job, recipe = run.job, run.job.recipe
    if recipe.engine is not Engine.FSDP2 or job.ranks == job.units.shard_ranks or not _reduces(run):
        return 0
    cast = recipe.reduce is not recipe.parameters
    return unit.reduce_output_bytes if cast or recipe.optimizer_in_backward else 0


def _layer(run: SimulationRun, index: int, *, after: int) -> None:
    """Record one layer: gather, recompute, run backward, reduce; `after` activations remain."""
    ledger, job = run.ledger, run.job
    cost = (job.layers if ledger.micro_batch == 0 else job.adding_layers)[index]
    if not job.layered:
        ledger.record_tape("layer", index, cost.backward)
        return
    unit, root_bytes = job.units.layers[index], job.units.root.unsharded_parameter_bytes
    whole = unit.unsharded_parameter_bytes
    ledger.unsharded = root_bytes + (run.kept_bytes(index + 1) or whole)
    if not job.keeps_unsharded:
        _regather(run, unit, index)
    ahead, reduces = _gathered_ahead(run, index), _reduces(run)
    # FSDP2 holds the previous reduction until this layer begins its own.
    after_it = job.units.layers[index + 1 : index + 2]
    previous = after_it[0].reduce_input_bytes if reduces and after_it else 0
    if not job.fsdp1:
        _prefetch(run, index, held=previous)
    ledger.record_tape(
        "layer",
        index,
        cost.backward,
        communication=ahead + (0 if job.fsdp1 else previous),
    )
    ledger.activations = after
    if job.fsdp1:
        ledger.record(
            "layer",
            index,
            "flat gradient of one layer",
            request_bytes=unit.gathered_bytes,
            communication=ahead,
            unsharded_gradients=unit.unsharded_gradient_bytes + unit.gathered_bytes,
        )
    ledger.unsharded -= whole
    if reduces:
        _reduce(run, unit, index, ahead)
        _keep_or_apply(run, unit, ahead)
    else:
        _keep_whole(run, unit, index, ahead)


def _regather(run: SimulationRun, unit: UnitSizes, index: int) -> None:
    job = run.job
    extra = unit.compute_shard_bytes if job.fsdp1 else unit.gathered_bytes
    run.ledger.record(
        "layer",
        index,
        "gathered layer",
        request_bytes=unit.gathered_bytes,
        communication=extra if job.on_device else extra + unit.parameter_bytes,
        temporaries=job.input_bytes,
    )


def _prefetch(run: SimulationRun, index: int, *, held: int) -> None:
    """Record FSDP2's gather of the next unit: for a moment it also holds the shards it has cast."""
    job, following = run.job, _unit_ahead(run, index)
    if following is None or job.recipe.compute is job.recipe.parameters:
        return
    run.ledger.record(
        "layer",
        index,
        "gathered next unit",
        request_bytes=following.gathered_bytes,
        communication=held + following.gathered_bytes + following.compute_shard_bytes,
        temporaries=job.input_bytes,  # the incoming gradient
    )


def _gathered_ahead(run: SimulationRun, index: int) -> int:
    """Return the bytes of the next unit of backward, gathered while this one computes."""
    following = _unit_ahead(run, index)
    if following is None:
        return 0
    return following.unsharded_parameter_bytes if run.job.fsdp1 else following.gathered_bytes


def _unit_ahead(run: SimulationRun, index: int) -> UnitSizes | None:
    job = run.job
    if job.keeps_unsharded or (job.fsdp1 and job.recipe.prefetch is not Prefetch.PRE):
        return None
    return job.units.layers[index - 1] if index > 0 else job.units.embedding


def _reduce(
    run: SimulationRun, unit: UnitSizes, index: int | None, ahead: int, *, kept: int = 0
) -> None:
    """Reduce one unit's gradients to this rank's shard, in the reduce dtype, then in its own.

    `kept` are unsharded gradients that FSDP2 still references while it reduces.
    """
    ledger, recipe = run.ledger, run.job.recipe
    other = 0 if recipe.reduce is recipe.parameters else unit.reduce_output_bytes
    if run.job.fsdp1 and run.job.units.shard_ranks == 1:
        other = 0  # NO_SHARD casts the flat gradient itself
    shard = unit.gradient_bytes
    if run.job.fsdp1:
        upcast = 0 if recipe.reduce is recipe.compute else unit.reduce_input_bytes
        ledger.record(
            unit.name,
            index,
            "reduced gradient",
            request_bytes=max(shard, upcast),
            communication=ahead + upcast + other,
            unsharded_gradients=unit.unsharded_gradient_bytes,
            temporaries=shard,
        )
        return
    ledger.record(
        unit.name,
        index,
        "reduce-scatter input",
        request_bytes=unit.reduce_input_bytes,
        communication=ahead + unit.reduce_input_bytes,
        # The accumulated gradients include this micro-batch's already.
        unsharded_gradients=0 if _accumulates_separately(run) else unit.unsharded_gradient_bytes,
    )
    ledger.record(
        unit.name,
        index,
        "reduced gradient",
        request_bytes=shard,
        communication=ahead + unit.reduce_input_bytes + other,
        unsharded_gradients=-unit.accumulated_gradient_bytes
        if _accumulates_separately(run)
        else kept,
        temporaries=shard,
    )


def _embedding(run: SimulationRun, unit: UnitSizes) -> None:
    """Record the backward pass of an embedding that is a unit of its own."""
    ledger, job, reduces = run.ledger, run.job, _reduces(run)
    previous = job.units.layers[0].reduce_input_bytes if reduces and not job.fsdp1 else 0
    ledger.record(
        "embedding",
        None,
        "gradient of the embedding",
        request_bytes=unit.unsharded_gradient_bytes,
        unsharded=unit.unsharded_parameter_bytes,
        communication=previous,
        unsharded_gradients=unit.unsharded_gradient_bytes
        + (unit.gathered_bytes if job.fsdp1 else 0),
        temporaries=job.input_bytes + job.embedding_saved_bytes,
    )
    if not reduces:
        _keep_whole(run, unit, None, 0)
        ledger.unsharded_gradients += unit.accumulated_gradient_bytes
        return
    # The last gradient of a unit is referenced until the unit is done: here it is the only one.
    kept = 0 if job.fsdp1 else unit.unsharded_gradient_bytes
    _reduce(run, unit, None, 0, kept=kept)
    _keep_or_apply(run, unit, 0, kept=kept)
    ledger.communication += _all_reduced_bytes(run, unit)


def _root(run: SimulationRun) -> None:
    """Record the end of backward: the root's gradients, the embedding's included where it belongs to it."""
    ledger, job = run.ledger, run.job
    root, embedding, reduces = job.units.root, job.units.embedding, _reduces(run)
    previous, held = 0, 0
    if not job.fsdp1:
        before = embedding or (job.units.layers[0] if job.layered else None)
        previous = before.reduce_input_bytes if before and reduces else 0
        held = job.embedding_saved_bytes + (0 if embedding else job.input_bytes)
    if not job.layered:
        # The layers' gradients are the root's own here; those of earlier micro-batches are separate.
        ledger.unsharded_gradients = (
            root.accumulated_gradient_bytes if _accumulates_separately(run) else 0
        )
    width = job.recipe.compute.size_bytes
    flat = root.gathered_bytes if job.fsdp1 else 0
    added = ledger.unsharded_gradients > 0 and not job.layered and job.recipe.accumulates_in_place
    new = rounded(root.largest_tensor_elements * width) if added else root.unsharded_gradient_bytes
    ledger.record(
        "root",
        None,
        "flat gradient of the root" if job.fsdp1 else "gradient of the root",
        request_bytes=flat or root.largest_tensor_elements * width,
        communication=previous,
        unsharded_gradients=new + flat,
        temporaries=held,
    )
    ledger.unsharded = 0
    if reduces:
        _reduce(run, root, None, 0)
        _keep_or_apply(run, root, 0)
    else:
        _keep_whole(run, root, None, 0)


def _keep_whole(run: SimulationRun, unit: UnitSizes, index: int | None, ahead: int) -> None:
    """Upcast unsharded gradients to the reduce dtype where FSDP2 keeps them for a later micro-batch.

    One by one, the embedding's first; each frees what it was cast from.
    """
    if (
        unit.accumulated_gradient_bytes <= unit.unsharded_gradient_bytes
        or run.ledger.micro_batch > 0
    ):
        return
    largest = rounded(unit.largest_tensor_elements * run.job.recipe.reduce.size_bytes)
    run.ledger.record(
        unit.name,
        index,
        "whole gradients in the reduce dtype",
        request_bytes=largest,
        communication=ahead,
        unsharded_gradients=max(
            unit.accumulated_gradient_bytes, unit.unsharded_gradient_bytes + largest
        ),
    )


def _keep_or_apply(run: SimulationRun, unit: UnitSizes, ahead: int, *, kept: int = 0) -> None:
    """Keep a unit's reduced gradient; with the optimizer in backward, apply it and free it."""
    ledger, job, recipe = run.ledger, run.job, run.job.recipe
    if not recipe.optimizer_in_backward or ledger.micro_batch < recipe.accumulate - 1:
        return
    if not job.state_on_device:
        return
    if ledger.step == 1:
        ledger.optimizer += unit.optimizer_bytes
    update = update_temporaries(recipe, (unit,))
    if job.fsdp1:
        # FSDP1 applies it within its reduction, which still references what it reduces.
        kept = unit.unsharded_gradient_bytes
        held = 0 if recipe.reduce is recipe.compute else unit.reduce_input_bytes
    else:
        held = unit.reduce_input_bytes
    ledger.record(
        unit.name,
        None,
        "optimizer update in backward",
        request_bytes=unit.largest_local_shard_elements * job.recipe.parameters.size_bytes,
        communication=ahead + held,
        unsharded_gradients=kept,
        temporaries=unit.gradient_bytes + update,
    )


def _finish(run: SimulationRun) -> None:
    """Set the ledger to what is alive after the backward pass."""
    ledger, job = run.ledger, run.job
    ledger.unsharded = ledger.communication = ledger.unsharded_gradients = ledger.activations = 0
    if not _reduces(run):
        ledger.gradients = 0
        ledger.unsharded_gradients = job.units.total("accumulated_gradient_bytes")
        return
    applied = job.recipe.optimizer_in_backward and (ledger.micro_batch == job.recipe.accumulate - 1)
    ledger.gradients = 0 if applied else job.gradient_bytes
