"""Sharding a classifier over the ranks: FSDP2 where torch has it, FSDP1 with the same meaning on 2.5.

Units: each transformer layer, the embedding where the recipe gives it one of its own, and the root
with the rest (final norm, heads). The heads stay in the root: they are used last forward and first
backward, next to the norm, so a unit of their own would lower no peak.

Whatever the engine, a rank holds of each parameter one contiguous range of its elements in row-major
order: its `LocalShard`. Loading, optimizers, checkpoints and export know shards only.

`sharding = "none"` replicates: the same units over a mesh whose shard dimension has size 1, so that
gradients are all-reduced unit by unit and everything else stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import CustomPolicy

from services.shared.jobs.spec import Recipe
from services.shared.jobs.state import Reason
from services.shared.memory.recipe import BFLOAT16_OPTIMIZERS, Engine
from services.shared.model.classifier import Classifier, embedding, transformer_layers
from services.shared.training.process import RunFailed, World

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_WRAPPER_NAMES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def default_engine() -> Engine:
    """Return the FSDP generation of the torch that is installed."""
    return Engine.of_torch(torch.__version__)


def parameter_dtype(recipe: Recipe) -> torch.dtype:
    """Return the type that parameters are kept in."""
    return torch.bfloat16 if recipe.optimizer in BFLOAT16_OPTIMIZERS else DTYPES[recipe.parameters]


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered and freed together."""

    name: str  # of its module; "" is the root
    num_elements: int
    rank_elements: int  # most elements one rank may hold, padding included


@dataclass(frozen=True, eq=False)
class LocalShard:
    """The range [start, stop) of one flattened parameter that this rank holds."""

    name: str  # in the unsharded classifier
    shape: tuple[int, ...]  # of the whole parameter
    start: int
    stop: int
    unit: int  # index into Sharded.units
    parameter: nn.Parameter  # what autograd fills the gradient of
    local: Tensor  # [stop - start], sharing memory with the parameter

    @property
    def num_elements(self) -> int:
        """Return the size of the whole parameter."""
        return prod(self.shape)

    def gradient(self) -> Tensor | None:
        """Return this rank's part of the gradient, [stop - start], or None."""
        grad = self.parameter.grad
        if grad is None:
            return None
        local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
        return local.reshape(-1)

    def clear_gradient(self) -> None:
        """Free the gradient."""
        self.parameter.grad = None


@dataclass(frozen=True)
class Sharded:
    """A classifier on all ranks, its parameters allocated but not yet filled."""

    module: nn.Module  # call this one
    classifier: Classifier
    engine: Engine
    recipe: Recipe
    units: list[Unit]
    shards: list[LocalShard]  # in the order of the classifier's parameters, the same on every rank

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all of every parameter."""
        return self.recipe.sharding == "none"

    @property
    def num_parameters(self) -> int:
        """Return the size of the whole classifier."""
        return sum(shard.num_elements for shard in self.shards)

    def clear_gradients(self) -> None:
        """Free the gradients of a step that has been applied."""
        for shard in self.shards:
            shard.clear_gradient()
        if self.engine is Engine.FSDP1:
            # The flat parameter keeps them all until its next forward pass: through an evaluation,
            # or the forward pass of a teacher.
            for wrapper in FullyShardedDataParallel.fsdp_modules(self.module):
                handle: Any = wrapper._handle
                if handle is not None:
                    handle.flat_param.grad = None

    def clear_decoder_bias(self) -> None:
        """Keep the heads of a decoder without bias, as the classifiers of transformers are.

        Called after every step. The parameter stays, so that an artifact's files, the plan and former
        models, which have one, need no second form.
        """
        if not self.classifier.causal:
            return
        for shard in self.shards:
            if shard.name.startswith("heads.") and shard.name.endswith(".bias"):
                shard.local.zero_()

    def reshard(self) -> None:
        """Free what a forward pass without backward may have left gathered (FSDP2)."""
        if self.engine is Engine.FSDP2:
            for module in self.module.modules():
                if hasattr(module, "set_requires_gradient_sync"):
                    module.reshard()  # type: ignore[operator]


def shard_classifier(
    classifier: Classifier, recipe: Recipe, world: World, *, engine: Engine | None = None
) -> Sharded:
    """Shard a classifier that was built under `torch.device("meta")`.

    Raises ValueError where the model has no layers to wrap.
    """
    engine = engine or default_engine()
    layers = transformer_layers(classifier)
    sizes = {name: tuple(p.shape) for name, p in classifier.named_parameters()}
    assert all(p.is_meta for p in classifier.parameters())
    buffers = _real_buffers(classifier, device=world.device)
    if recipe.activation_checkpointing:
        layers = [_checkpointed(classifier, layer) for layer in layers]
    own = layers if recipe.wrap == "layer" else []
    if recipe.embedding == "own" and recipe.wrap == "layer":
        own = [embedding(classifier), *own]
    units = _units(classifier, own, recipe, world, engine)
    wrap = _fsdp2 if engine is Engine.FSDP2 else _fsdp1
    module = wrap(classifier, own, recipe, world)
    for name, values in buffers.items():
        owner, _, key = name.rpartition(".")
        classifier.get_submodule(owner)._buffers[key] = values
    find = _local_shards_fsdp2 if engine is Engine.FSDP2 else _local_shards_fsdp1
    found = {shard.name: shard for shard in find(module, sizes, units, world)}
    assert found.keys() == sizes.keys(), sizes.keys() ^ found.keys()
    return Sharded(
        module=module,
        classifier=classifier,
        engine=engine,
        recipe=recipe,
        units=[unit for unit, _ in units],
        shards=[found[name] for name in sizes],
    )


def plain_name(name: str) -> str:
    """Return a parameter's name without what wrappers add to it."""
    for wrapper in _WRAPPER_NAMES:
        name = name.replace(wrapper, "")
    return name


def _real_buffers(classifier: Classifier, *, device: torch.device) -> dict[str, Tensor]:
    """Return the buffers of a meta model, computed by the model's own initialisation.

    Buffers (rotary frequencies, position numbers) are in no checkpoint file; since transformers 5
    every architecture refills them in `_init_weights`. A sentinel proves that it did.
    """
    backbone: Any = classifier.backbone
    found = {}
    for path, module in classifier.named_modules():
        names = [name for name, b in module.named_buffers(recurse=False) if b.is_meta]
        kept = [name for name in names if name not in module._non_persistent_buffers_set]
        if kept:
            raise ValueError(
                f"{type(module).__name__} keeps state in buffer {kept[0]!r}, which sharded loading "
                "does not carry"
            )
        for name in names:
            meta = module._buffers[name]
            assert meta is not None
            module._buffers[name] = _sentinel(meta, device)
        if names:
            backbone._init_weights(module)
        for name in names:
            value = module._buffers[name]
            assert value is not None
            full = f"{path}.{name}" if path else name
            if torch.equal(value, _sentinel(value, device)) or bool(value.isnan().any()):
                raise ValueError(f"{type(module).__name__} does not initialise its buffer {full!r}")
            found[full] = value
    return found


def _sentinel(like: Tensor, device: torch.device) -> Tensor:
    value = float("nan") if like.is_floating_point() else -(2**7)
    return torch.full(like.shape, value, dtype=like.dtype, device=device)


def _checkpointed(classifier: nn.Module, layer: nn.Module) -> nn.Module:
    """Replace a layer by its activation-checkpointing wrapper and return the wrapper."""
    wrapped = checkpoint_wrapper(layer, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    for parent in list(classifier.modules()):
        for name, child in parent.named_children():
            if child is layer and parent is not wrapped:
                setattr(parent, name, wrapped)
    return wrapped


def _units(
    classifier: nn.Module, own: list[nn.Module], recipe: Recipe, world: World, engine: Engine
) -> list[tuple[Unit, set[str]]]:
    """Return the units in module order, root last, each with the names of its parameters."""
    num_shards = 1 if recipe.sharding == "none" else world.size
    paths = {id(module): path for path, module in classifier.named_modules()}
    taken: set[str] = set()
    units = []
    for module in [*own, classifier]:
        path = paths[id(module)]
        prefix = f"{path}." if path else ""
        members = {
            plain_name(prefix + name): p
            for name, p in module.named_parameters()
            if plain_name(prefix + name) not in taken
        }
        taken |= members.keys()
        count = sum(p.numel() for p in members.values())
        if engine is Engine.FSDP2:
            held = sum(-(-p.shape[0] // num_shards) * prod(p.shape[1:]) for p in members.values())
        else:
            held = -(-count // num_shards)
        units.append((Unit(plain_name(path + ".").rstrip("."), count, held), set(members)))
    return units


def _fsdp2(classifier: Classifier, own: list[nn.Module], recipe: Recipe, world: World) -> nn.Module:
    # Public from torch 2.6 on; 2.5 must still be able to import this file.
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    kind = world.device.type
    mesh = (
        init_device_mesh(kind, (world.size, 1), mesh_dim_names=("replicate", "shard"))
        if recipe.sharding == "none"
        else init_device_mesh(kind, (world.size,))
    )
    parameters, compute, reduce = _dtypes(recipe)
    offloaded = recipe.offload == "all" and kind != "cpu"
    options: dict[str, Any] = {
        "mesh": mesh,
        # The root too: its norm and heads are small to gather again, and nothing stays whole. Of
        # replicas the copy in compute type goes, which is cast again.
        "reshard_after_forward": recipe.sharding != "grad_op",
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=None if compute == parameters else compute,
            reduce_dtype=None if reduce == compute else reduce,
        ),
        "offload_policy": CPUOffloadPolicy() if offloaded else OffloadPolicy(),
    }
    for module in [*own, classifier]:
        fully_shard(module, **options)
    classifier.to_empty(device="cpu" if offloaded else world.device)
    return classifier


def _fsdp1(classifier: Classifier, own: list[nn.Module], recipe: Recipe, world: World) -> nn.Module:
    if recipe.offload == "all" and world.device.type != "cpu":
        # FSDP1 moves its shards to pinned memory of its own in the first forward pass.
        raise RunFailed(
            Reason.BAD_SPEC, "recipe.offload all needs torch 2.6 or later (FSDP2); this is FSDP1"
        )
    strategy = {
        "full": ShardingStrategy.FULL_SHARD,
        "grad_op": ShardingStrategy.SHARD_GRAD_OP,
        "none": ShardingStrategy.NO_SHARD,
    }[recipe.sharding]
    if world.size == 1:
        # What FSDP1 makes of any strategy on one rank, and warns of once for every module.
        strategy = ShardingStrategy.NO_SHARD
    parameters, compute, reduce = _dtypes(recipe)
    chosen = {id(module) for module in own}

    def allocate(module: nn.Module) -> None:
        # Not `to_empty`, which swaps tensors where they are fake (`dry_run`), and may not.
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device=world.device)
            module.register_parameter(name, nn.Parameter(empty))

    mixed = MixedPrecision(
        param_dtype=None if compute == parameters else compute, reduce_dtype=reduce
    )
    return FullyShardedDataParallel(
        classifier,
        sharding_strategy=strategy,
        auto_wrap_policy=CustomPolicy(lambda module: id(module) in chosen),
        mixed_precision=mixed,
        # BACKWARD_PRE gathers the next layer early: one more unit at the peak. Nothing of it helps
        # on a CPU.
        backward_prefetch=None if world.device.type == "cpu" else BackwardPrefetch.BACKWARD_PRE,
        param_init_fn=allocate,
        device_id=world.device,
        use_orig_params=True,
        limit_all_gathers=True,
    )


def _dtypes(recipe: Recipe) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
    return parameter_dtype(recipe), DTYPES[recipe.compute], DTYPES[recipe.reduce]


def _local_shards_fsdp2(
    module: nn.Module,
    sizes: dict[str, tuple[int, ...]],
    units: list[tuple[Unit, set[str]]],
    world: World,
) -> Iterator[LocalShard]:
    unit_of = {name: i for i, (_, members) in enumerate(units) for name in members}
    for full_name, parameter in module.named_parameters():
        name = plain_name(full_name)
        shape = sizes[name]
        # Not sharded after all, where the parameter is an ordinary tensor: memory_probe stops that.
        held: Any = parameter.detach()
        local = held.to_local() if hasattr(held, "to_local") else held
        row = prod(shape[1:])
        first = 0
        if local.shape[0] != shape[0]:
            first = min(world.rank * -(-shape[0] // world.size), shape[0])
        start, stop = first * row, (first + local.shape[0]) * row
        yield LocalShard(name, shape, start, stop, unit_of[name], parameter, local.view(-1))


def _local_shards_fsdp1(
    module: nn.Module,
    sizes: dict[str, tuple[int, ...]],
    units: list[tuple[Unit, set[str]]],
    _world: World,
) -> Iterator[LocalShard]:
    unit_of = {name: i for i, (_, members) in enumerate(units) for name in members}
    names = {id(p): plain_name(name) for name, p in module.named_parameters()}
    for wrapper in FullyShardedDataParallel.fsdp_modules(module):
        handle: Any = wrapper._handle
        if handle is None:
            continue
        flat = handle.flat_param
        shard_data = flat.data  # the storage that stays this rank's
        for i, parameter in enumerate(flat._params):
            name = names[id(parameter)]
            shape = sizes[name]
            if handle.uses_sharded_strategy:
                info = flat._shard_param_infos[i]
                start = info.intra_param_start_idx if info.in_shard else 0
                stop = info.intra_param_end_idx + 1 if info.in_shard else 0
                at = info.offset_in_shard if info.in_shard else 0
                local = shard_data[at : at + stop - start]
            else:
                start, stop, local = 0, prod(shape), parameter.data.view(-1)
            yield LocalShard(name, shape, start, stop, unit_of[name], parameter, local)
