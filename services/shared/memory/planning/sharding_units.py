"""Sharding units and their sizes on one rank: stored, gathered, reduced and updated bytes.

The worst rank is rank 0: FSDP2 gives it the first, largest chunk of every tensor; FSDP1 gives every
rank an equal part of the flattened unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from services.shared.memory.architecture.parameters import Tensor, UnitKind
from services.shared.memory.architecture.shape import Shape
from services.shared.memory.planning.allocation_tape import rounded
from services.shared.memory.recipe import (
    Embedding,
    Engine,
    Optimizer,
    Recipe,
    Sharding,
    Wrap,
)

# One 32-bit scale for every block of 256 states of one byte (Dettmers et al. 2022).
_STATE_BLOCK = 256


class UnitSizes(NamedTuple):
    """One unit in bytes, on rank 0: `shard_*` is the local shard, `unsharded_*` the whole unit."""

    name: str
    elements: int
    shard_elements: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    unsharded_parameter_bytes: int
    gathered_bytes: int
    unsharded_gradient_bytes: int
    accumulated_gradient_bytes: int
    reduce_input_bytes: int
    reduce_output_bytes: int
    compute_shard_bytes: int
    flat_parameter_bytes: int
    largest_local_shard_elements: int
    largest_tensor_elements: int


class Units(NamedTuple):
    """All sharding units of a model: the root, the embedding's own where it has one, the layers."""

    root: UnitSizes
    embedding: UnitSizes | None
    layers: tuple[UnitSizes, ...]
    shard_ranks: int

    @property
    def all(self) -> tuple[UnitSizes, ...]:
        """Every unit, in the order of the forward pass after the root."""
        own = (self.embedding,) if self.embedding else ()
        return (self.root, *own, *self.layers)

    def total(self, field: str) -> int:
        """Return the sum of one size over all units."""
        return sum(getattr(unit, field) for unit in self.all)

    def layers_below(self, field: str, count: int) -> int:
        """Return the sum of one size over the first `count` layers."""
        return sum(getattr(unit, field) for unit in self.layers[:count])

    def layers_from(self, field: str, index: int) -> int:
        """Return the sum of one size over layer `index` and all that follow."""
        return sum(getattr(unit, field) for unit in self.layers[index:])


def shard_ranks(recipe: Recipe, ranks: int) -> int:
    """Return over how many ranks one copy of the model is divided."""
    if recipe.sharding is Sharding.NONE:
        return 1
    if recipe.sharding is Sharding.HYBRID:
        assert recipe.shard_ranks is not None
        return min(recipe.shard_ranks, ranks)
    return ranks


def units_of(shape: Shape, recipe: Recipe, ranks: int) -> Units:
    """Return the sharding units of `shape` under `recipe`."""
    divided = shard_ranks(recipe, ranks)
    own_embedding = recipe.embedding is Embedding.OWN and recipe.wrap is Wrap.LAYER
    root: list[Tensor] = []
    layers: list[UnitSizes] = []
    embedding = None
    # Equal layers share their tensors: measure each kind once.
    kinds: dict[int, UnitSizes] = {}
    for unit in shape.units:
        if unit.kind is UnitKind.LAYER and recipe.wrap is Wrap.LAYER:
            kind = id(unit.tensors)
            if kind not in kinds:
                kinds[kind] = _sizes(unit.tensors, "layer", recipe, divided)
            layers.append(kinds[kind])
        elif unit.kind is UnitKind.EMBEDDING and own_embedding:
            # The word embedding alone is the module that is wrapped; positions stay in the root.
            embedding = _sizes(unit.tensors[:1], "embedding", recipe, divided)
            root.extend(unit.tensors[1:])
        else:
            root.extend(unit.tensors)
    return Units(_sizes(tuple(root), "root", recipe, divided), embedding, tuple(layers), divided)


def local_parameter_shards(shape: Shape, recipe: Recipe, ranks: int) -> list[tuple[str, int]]:
    """Return (name, elements on rank 0) of every parameter, in the order of `model.parameters()`."""
    divided = shard_ranks(recipe, ranks)
    layered = recipe.wrap is Wrap.LAYER
    outside = [t for unit in shape.units if unit.kind is not UnitKind.LAYER for t in unit.tensors]
    if not layered:
        outside = [tensor for unit in shape.units for tensor in unit.tensors]
    if recipe.engine is not Engine.FSDP1:
        outside = [tensor for tensor in outside if _is_trained(tensor)]
    held = [(t.name, count) for t, count in local_shards(outside, recipe.engine, divided)]
    in_front = len(shape.embedding.tensors)
    found = held[:in_front]
    if layered:
        for unit in shape.layers:
            found += [(t.name, n) for t, n in local_shards(unit.tensors, recipe.engine, divided)]
    return [*found, *held[in_front:]]


def layer_gradients(shape: Shape, width: int) -> tuple[int, ...]:
    """Return the bytes of the whole gradients of the first n layers by n, `width` bytes a value."""
    sizes = (sum(rounded(width * t.elements) for t in unit.tensors) for unit in shape.layers)
    return tuple(accumulate(sizes, initial=0))


def local_shards(
    tensors: Sequence[Tensor], engine: Engine, ranks: int
) -> Iterator[tuple[Tensor, int]]:
    """Yield each tensor with the number of its elements in rank 0's shard, where there are any."""
    if engine is not Engine.FSDP1:
        for tensor in tensors:
            yield tensor, _chunk_elements(tensor, ranks)
        return
    left = -(-sum(tensor.elements for tensor in tensors) // ranks)
    for tensor in tensors:
        held = min(left, tensor.elements)
        if not held:
            return
        yield tensor, held
        left -= held


def _sizes(tensors: tuple[Tensor, ...], name: str, recipe: Recipe, ranks: int) -> UnitSizes:
    return _measure(
        tensors,
        name,
        recipe.engine,
        (recipe.parameters.size_bytes, recipe.compute.size_bytes, recipe.reduce.size_bytes),
        recipe.optimizer,
        ranks,
    )


@lru_cache(maxsize=4096)
def _measure(
    tensors: tuple[Tensor, ...],
    name: str,
    engine: Engine,
    widths: tuple[int, int, int],
    optimizer: Optimizer,
    ranks: int,
) -> UnitSizes:
    p, c, r = widths
    held = list(local_shards(tensors, engine, ranks))
    elements = sum(tensor.elements for tensor in tensors)
    if engine is Engine.FSDP1:
        shard = -(-elements // ranks)
        parameter_bytes = rounded(p * shard)
        whole_bytes = rounded(c * shard * ranks)
    else:
        shard = sum(count for _, count in held)
        parameter_bytes = sum(rounded(p * count) for _, count in held)
        whole_bytes = sum(rounded(c * count * ranks) for _, count in held)
    # Parameters that the loss does not depend on have neither gradient nor state, except within
    # FSDP1's flat parameter.
    flat = engine is Engine.FSDP1
    trained = held if flat else [(t, n) for t, n in held if _is_trained(t)]
    trained_shard = shard if flat else sum(count for _, count in trained)
    reached = [tensor for tensor in tensors if flat or _is_trained(tensor)]
    sizes = UnitSizes(
        name=name,
        elements=elements,
        shard_elements=shard,
        parameter_bytes=parameter_bytes,
        gradient_bytes=rounded(p * trained_shard),
        optimizer_bytes=sum(_state_bytes(t, n, p, optimizer) for t, n in trained),
        unsharded_parameter_bytes=whole_bytes,
        # fully_shard copies straight into the parameters where there is nothing to gather.
        gathered_bytes=0 if ranks == 1 and engine is Engine.FSDP2 else rounded(c * shard * ranks),
        unsharded_gradient_bytes=sum(rounded(c * tensor.elements) for tensor in reached),
        accumulated_gradient_bytes=sum(
            rounded((max(c, r) if engine is Engine.FSDP2 else c) * t.elements) for t in reached
        ),
        reduce_input_bytes=rounded(r * trained_shard * ranks),
        reduce_output_bytes=rounded(r * trained_shard),
        compute_shard_bytes=rounded(c * shard),
        flat_parameter_bytes=rounded(p * shard * ranks),
        largest_local_shard_elements=max((count for _, count in held), default=0),
        largest_tensor_elements=max((tensor.elements for tensor in tensors), default=0),
    )
    return _replicated(sizes, cast=c != p) if engine is Engine.DDP else sizes


def _replicated(sizes: UnitSizes, *, cast: bool) -> UnitSizes:
    """DDP gathers nothing and reduces in its own buckets; autocast keeps a copy in the compute dtype."""
    return sizes._replace(
        unsharded_parameter_bytes=sizes.unsharded_parameter_bytes if cast else 0,
        gathered_bytes=0,
        reduce_input_bytes=0,
        reduce_output_bytes=0,
        compute_shard_bytes=0,
    )


def _is_trained(tensor: Tensor) -> bool:
    # The classifier reads hidden states: BERT's pooler runs, but no loss depends on it.
    return not tensor.name.startswith("pooler.")


def _chunk_elements(tensor: Tensor, ranks: int) -> int:
    rows = tensor.shape[0]
    return -(-rows // ranks) * (tensor.elements // rows)


def _state_bytes(tensor: Tensor, count: int, p: int, optimizer: Optimizer) -> int:
    """Return the optimizer state of `count` elements of `tensor` on one rank."""
    if optimizer is Optimizer.SGD:
        return 0
    if optimizer is Optimizer.ADAFACTOR:
        if len(tensor.shape) < 2:
            return rounded(4 * count)
        columns = tensor.shape[-1]
        return rounded(4 * columns) + rounded(4 * (tensor.elements // columns))
    step = rounded(4) if optimizer is Optimizer.ADAMW else 0
    return moments_bytes(count, optimizer, p) + step


_MASTER_REST_BYTES = {Optimizer.ADAMW_SPLIT: 2, Optimizer.ADAMW_SPLIT24: 1}
_8_BIT_MOMENTS = {Optimizer.ADAMW_8BIT, *_MASTER_REST_BYTES}


def moments_bytes(count: int, optimizer: Optimizer, p: int) -> int:
    """Return both moments of AdamW for `count` elements of one local shard, for parameters of `p` bytes.

    With the rest of the master, where the optimizer splits one.
    """
    if optimizer in _8_BIT_MOMENTS:
        rest = rounded(_MASTER_REST_BYTES.get(optimizer, 0) * count)
        return 2 * (rounded(count) + rounded(-(-count // _STATE_BLOCK) * 4)) + rest
    return 2 * rounded(p * count)
