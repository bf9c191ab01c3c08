"""Records a forward pass in the ledger: gather a unit, run it, free it."""

from __future__ import annotations

from services.shared.memory.planning.allocation_tape import rounded
from services.shared.memory.planning.rank_job import SimulationRun
from services.shared.memory.planning.sharding_units import UnitSizes
from services.shared.memory.recipe import Engine


def record_forward(run: SimulationRun, *, first: bool) -> None:
    """Record a training forward pass; afterwards `activations` are all that backward needs."""
    ledger, job = run.ledger, run.job
    left = 0
    if job.fsdp1 and first:
        _lazy_init(run)
        left = _checkpoint_shards(run)
    elif job.fsdp1 and ledger.micro_batch == 0 and not job.recipe.optimizer_in_backward:
        _previous_gradients(run)
    ledger.parameters += left
    _enter_root(run)
    ledger.activations += job.embedding_saved_bytes
    base = ledger.activations
    for index in run.indices():
        ledger.activations = base + run.saved_before(index)
        if job.recipe.activation_checkpointing and index:
            ledger.activations += job.layers[index - 1].returned_bytes
        _enter_layer(run, index)
        ledger.record_tape("layer", index, job.layers[index].forward)
        _leave_layer(run, index)
    ledger.activations = base + run.saved_before(job.num_layers)
    ledger.record_tape("root", None, job.final.forward)
    # Nothing is gathered after the last layer: its buffer is freed when the root's forward returns.
    ledger.communication = 0
    ledger.parameters -= left
    ledger.unsharded = job.units.root.unsharded_parameter_bytes + run.kept_bytes(job.num_layers)


def record_inference(run: SimulationRun) -> None:
    """Record a forward pass that saves nothing: an evaluation, or a teacher's."""
    ledger, job = run.ledger, run.job
    _enter_root(run)
    for index in run.indices():
        # The layer's input, besides the embedding's output, which is held to the end.
        held = job.input_bytes + job.layers[index - 1].returned_bytes if index else 0
        ledger.activations += held
        _enter_layer(run, index)
        ledger.record_tape("layer", index, job.layers[index].inference)
        ledger.activations -= held
        _leave_layer(run, index)
    ledger.unsharded = ledger.communication = ledger.activations = 0


def _enter_root(run: SimulationRun) -> None:
    """Gather the root and run what comes before the first layer."""
    ledger, job = run.ledger, run.job
    root, embedding = job.units.root, job.units.embedding
    ledger.record(
        "root",
        None,
        "gathered root",
        request_bytes=max(root.unsharded_parameter_bytes, root.gathered_bytes),
        unsharded=root.unsharded_parameter_bytes,
        communication=_gather_bytes(run, root),
    )
    ledger.unsharded = root.unsharded_parameter_bytes
    # FSDP2 holds a gather's buffer until the next unit has copied its own out.
    ledger.communication = 0 if job.fsdp1 else root.gathered_bytes
    ledger.activations += job.shared_input_bytes + job.input_bytes
    if embedding is not None:
        _gather(run, embedding, None)


def _lazy_init(run: SimulationRun) -> None:
    """FSDP1's first forward: the root gathers once in the parameters' own dtype."""
    root, recipe = run.job.units.root, run.job.recipe
    kept = 0
    if recipe.upcasts:
        # With use_orig_params the checkpoint's shards outlive their upcast until here.
        kept = rounded(run.job.units.total("shard_elements") * recipe.checkpoint.size_bytes)
    run.ledger.record(
        "root",
        None,
        "whole root for the first gather",
        request_bytes=root.flat_parameter_bytes,
        unsharded=root.flat_parameter_bytes,
        temporaries=kept,
    )


def _checkpoint_shards(run: SimulationRun) -> int:
    """Return the shards in the checkpoint's dtype that are alive in the first forward pass.

    After an upcast the root's stays to the end of it, each layer's until the layer has run.
    """
    job = run.job
    if not job.recipe.upcasts:
        return 0
    layer = max((unit.shard_elements for unit in job.units.layers), default=0)
    shards = job.units.root.shard_elements + layer
    return rounded(shards * job.recipe.checkpoint.size_bytes)


def _previous_gradients(run: SimulationRun) -> None:
    """FSDP1 with use_orig_params keeps flat gradients after zero_grad until its next pass."""
    job = run.job
    # NO_SHARD frees them.
    if job.layered and job.on_device and job.units.shard_ranks > 1:
        left = job.gradient_bytes - job.units.root.gradient_bytes
        run.ledger.record("root", None, "gradients of the step before", temporaries=left)


def _gather(run: SimulationRun, unit: UnitSizes, index: int | None) -> None:
    """Gather one unit in addition to those gathered already."""
    ledger = run.ledger
    ledger.record(
        unit.name,
        index,
        f"gathered {unit.name}",
        request_bytes=max(unit.gathered_bytes, unit.unsharded_parameter_bytes),
        unsharded=unit.unsharded_parameter_bytes,
        communication=_gather_bytes(run, unit),
    )
    if not run.job.fsdp1:
        ledger.communication = unit.gathered_bytes


def _gather_bytes(run: SimulationRun, unit: UnitSizes) -> int:
    """Return the bytes that a gather needs besides the unsharded unit: FSDP1's shard in compute dtype,
    FSDP2's gathered buffer, and the shards copied from the host where they are offloaded."""
    extra = unit.compute_shard_bytes if run.job.fsdp1 else unit.gathered_bytes
    if not extra and run.job.recipe.engine is Engine.FSDP2:
        # With nothing to gather, parameters are cast one by one.
        extra = unit.largest_tensor_elements * run.job.recipe.compute.size_bytes
    return extra if run.job.on_device else extra + unit.parameter_bytes


def _enter_layer(run: SimulationRun, index: int) -> None:
    job, ledger = run.job, run.ledger
    if not job.layered:
        return
    unit = job.units.layers[index]
    # Set, not added to: between the ends, layers are skipped.
    ledger.unsharded = job.units.root.unsharded_parameter_bytes + run.kept_bytes(index)
    _gather(run, unit, index)
    ledger.unsharded += unit.unsharded_parameter_bytes


def _leave_layer(run: SimulationRun, index: int) -> None:
    if run.job.layered:
        kept = run.kept_bytes(index + 1)
        run.ledger.unsharded = run.job.units.root.unsharded_parameter_bytes + kept
