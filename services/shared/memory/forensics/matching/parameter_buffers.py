"""Sizes that parameters, gradients and optimizer state request, in units, shards and buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from services.shared.memory.architecture.parameters import Unit
from services.shared.memory.architecture.shape import Shape
from services.shared.memory.forensics.matching.candidates import Candidate, Role, Workload
from services.shared.memory.sizes import MIB

_DTYPES = (("bfloat16", 2), ("float32", 4))
# DeepSpeed, runtime/zero/config.py and deepspeed/runtime/constants.py: default buckets in elements,
# and the sub-groups in which ZeRO-3 updates.
_ZERO_BUCKETS = (500_000_000, 200_000_000)
_ZERO_SUB_GROUP = 1_000_000_000
# transformers, integrations/deepspeed.py: what "auto" sets, in parts of hidden_size squared.
_ZERO_AUTO = ((10, "reduce"), (9, "prefetch"))
# torch, csrc/distributed/c10d/reducer.hpp: the first bucket and the cap of all others.
_DDP_FIRST_BUCKET = 1 * MIB
_DDP_BUCKET = 25 * MIB

Buffer = tuple[Role, str, int]  # role, name, number of elements


def parameter_candidates(shape: Shape | None, workload: Workload) -> Iterator[Candidate]:
    """Yield every buffer of parameters, gradients or state, whole and as one rank's share."""
    ranks = workload.ranks or 1
    for role, what, elements in _buffers(shape, workload):
        for dtype, size in _DTYPES:
            yield Candidate(role, what, elements * size, dtype)
            if ranks > 1 and role not in (Role.FUSED_WEIGHTS, Role.GROUP):
                share = -(-elements // ranks) * size
                yield Candidate(role, f"1/{ranks} of {what}", share, dtype, divided_by=ranks)
    if workload.zero:
        yield from _zero_buckets(shape, workload)
    if workload.replicates and shape is not None and workload.trains_all:
        yield from _ddp_buckets(shape)
    if workload.bits and shape is not None:
        yield from _packed_weights(shape, workload.bits)


def _buffers(shape: Shape | None, workload: Workload) -> Iterator[Buffer]:
    if shape is None:
        if workload.num_parameters:
            yield Role.MODEL, "all parameters in one buffer", workload.num_parameters
        if workload.vocab_size and workload.hidden_size:
            table = workload.vocab_size * workload.hidden_size
            yield Role.EMBEDDING, "embedding or output projection weight", table
            yield Role.EMBEDDING, "embedding and output projection together", 2 * table
        return
    yield Role.MODEL, "all parameters in one buffer", shape.num_parameters
    for elements in sorted({layer.elements for layer in shape.layers}):
        yield Role.LAYER, "one transformer layer as a flat buffer", elements
    root = sum(unit.elements for unit in (shape.embedding, shape.norm, *shape.outputs))
    yield Role.ROOT, "root unit (embedding, norm and heads) as a flat buffer", root
    table = shape.dims.vocab_size * shape.dims.hidden_size
    yield Role.EMBEDDING, f"{table_name(shape)} weight", table
    if shape.language_head and not shape.dims.tied:
        yield Role.EMBEDDING, "embedding and output projection together", 2 * table
    yield from _weights(shape)
    yield from _groups(shape)


def table_name(shape: Shape) -> str:
    """Return what a matrix of vocabulary x hidden size is called in this model."""
    return "embedding or output projection" if shape.language_head else "embedding"


def _weights(shape: Shape) -> Iterator[Buffer]:
    names: dict[int, list[str]] = {}
    for layer in shape.layers:
        for tensor in layer.tensors:
            if len(tensor.shape) < 2:
                continue
            known = names.setdefault(tensor.elements, [])
            if tensor.name not in known:
                known.append(tensor.name)
            if len(tensor.shape) == 3:  # experts stacked in one tensor: also one expert's matrix
                inner = names.setdefault(prod(tensor.shape[1:]), [])
                if (one := f"one expert of {tensor.name}") not in inner:
                    inner.append(one)
    for elements, alike in names.items():
        yield Role.WEIGHT, " or ".join(name.removesuffix(".weight") for name in alike), elements
    gate_up = 2 * shape.dims.intermediate_size * shape.dims.hidden_size
    if shape.dims.gated and gate_up not in names:
        yield Role.FUSED_WEIGHTS, "gate and up projections in one tensor", gate_up


def _groups(shape: Shape) -> Iterator[Buffer]:
    """Yield the matrices of the attention, and of the MLP, of one layer: units of finer wrapping."""
    layer = shape.layers[-1]
    matrices = [t for t in layer.tensors if len(t.shape) >= 2]
    attention = sum(t.elements for t in matrices if "attn" in t.name or "attention" in t.name)
    rest = sum(t.elements for t in matrices) - attention
    if attention and rest:
        yield Role.GROUP, "attention projections of a layer together", attention
        yield Role.GROUP, "MLP projections of a layer together", rest


def _zero_buckets(shape: Shape | None, workload: Workload) -> Iterator[Candidate]:
    hidden = shape.dims.hidden_size if shape else workload.hidden_size
    buckets = [(f"ZeRO bucket of {n:,} elements", n) for n in _ZERO_BUCKETS]
    if hidden:
        buckets += [
            (f'ZeRO {name} bucket that "auto" sets', tenths * hidden * hidden // 10)
            for tenths, name in _ZERO_AUTO
        ]
    share = (workload.num_parameters or 0) // (workload.ranks or 1)
    if share > _ZERO_SUB_GROUP:
        buckets.append(("ZeRO-3 sub-group of 1,000,000,000 elements", _ZERO_SUB_GROUP))
    for what, elements in buckets:
        for dtype, size in _DTYPES:
            yield Candidate(Role.BUCKET, what, elements * size, dtype)


def _ddp_buckets(shape: Shape) -> Iterator[Candidate]:
    """Yield DDP's buckets of gradients: one of everything at first, then up to 25 MiB or a tensor.

    Source: torch, nn/parallel/distributed.py (`_ddp_init_helper`: one bucket where every parameter is
    used) and csrc/distributed/c10d/reducer.cpp (`compute_bucket_assignment_by_size`).
    """
    for dtype, size in _DTYPES:
        for elements in dict.fromkeys(_joined_gradients(shape.units, size)):
            what = f"DDP bucket of {elements:,} gradients"
            yield Candidate(Role.BUCKET, what, elements * size, dtype)


def _joined_gradients(units: Iterable[Unit], size: int) -> Iterator[int]:
    """Yield the elements of DDP's buckets of several tensors, in reverse order of registration."""
    elements, tensors, limit = 0, 0, _DDP_FIRST_BUCKET
    for tensor in reversed([tensor for unit in units for tensor in unit.tensors]):
        elements, tensors = elements + tensor.elements, tensors + 1
        if elements * size >= limit:
            if tensors > 1:
                yield elements
            elements, tensors, limit = 0, 0, _DDP_BUCKET
    if tensors > 1:
        yield elements


def _packed_weights(shape: Shape, bits: int) -> Iterator[Candidate]:
    """Yield the weights of a layer as bitsandbytes stores them: packed, in bytes."""
    name = "nf4" if bits == 4 else "int8"
    for _, what, elements in _weights(shape):
        yield Candidate(Role.PACKED, f"{what}, quantised", elements * bits // 8, name)
