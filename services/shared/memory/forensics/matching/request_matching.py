"""Match the size that an allocator printed to the tensors that would request it.

What is printed is the size asked from the driver, not the tensor's: the allocator rounds it first.
Source of the rounding: c10/cuda/CUDACachingAllocator.cpp (`round_size`, `get_allocation_size`);
torch_npu NPUCachingAllocator.cpp for the 32 bytes that Ascend adds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from math import prod
from typing import TypedDict

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.oom_log.message_formats import Backend
from services.shared.memory.oom_log.message_parser import PrintedSize
from services.shared.memory.sizes import MIB

_BLOCK = 512
_SMALL_REQUEST = 1 * MIB  # at most this is served from segments of 2 MiB
_SMALL_SEGMENT = 2 * MIB
_LARGE_REQUEST = 10 * MIB  # below this a segment of 20 MiB is asked for
_LARGE_SEGMENT = 20 * MIB
_LARGE_STEP = 2 * MIB
_NPU_PADDING = 32
# Back ends that print the tensor's own size instead of a segment's.
_EXACT_BACKENDS = frozenset({Backend.HOST, Backend.HPU})
# DeepSpeed's default and its usual reduce and gather buckets, in elements (runtime/zero/config.py).
_ZERO_BUCKETS = (500_000_000, 200_000_000)
_MOST_ADDED_TOKENS = 64  # a tokenizer gains a few special tokens; more is another vocabulary


class Match(str, Enum):
    """How well a candidate matches the request; best first."""

    EXACT = "exact"  # prints the same, and the print resolves 2 MiB
    WITHIN_ROUNDING = "within_rounding"  # prints the same, in units too coarse to be sure
    LOOSE = "loose"  # fits for some number that was not given

    __str__ = str.__str__


class Role(str, Enum):
    """The role of a candidate tensor in a training job."""

    LAYER = "layer"  # one whole transformer layer as a flat buffer
    ROOT = "root"  # everything outside the layers as a flat buffer
    MODEL = "model"  # every parameter in one buffer
    EMBEDDING = "embedding"  # embedding or output projection, or both
    PARAMETERS = "parameters"  # a buffer of parameters or state that the job's timeline names
    WEIGHT = "weight"
    FUSED_WEIGHTS = "fused_weights"  # gate and up in one tensor, as some engines load them
    LOGITS = "logits"
    SCORES = "scores"
    ACTIVATION = "activation"
    BUCKET = "bucket"

    __str__ = str.__str__


class CandidateDict(TypedDict):
    """A candidate as plain values."""

    what: str
    bytes: int
    dtype: str
    match: Match
    role: Role
    divided_by: int
    tokens: int | None
    ambiguous: bool


@dataclass(frozen=True)
class Candidate:
    """A tensor that would have produced the printed request.

    `divided_by` is the number of ranks that share it: 1 for a whole tensor. `tokens` is set where
    it depends on the tokens of a rank, solved from the number where they were not given.
    """

    role: Role
    what: str
    size_bytes: int
    dtype: str
    match: Match = Match.LOOSE
    divided_by: int = 1
    tokens: int | None = None
    ambiguous: bool = False

    def to_dict(self) -> CandidateDict:
        """Return the candidate as plain values."""
        return {
            "what": self.what,
            "bytes": self.size_bytes,
            "dtype": self.dtype,
            "match": self.match,
            "role": self.role,
            "divided_by": self.divided_by,
            "tokens": self.tokens,
            "ambiguous": self.ambiguous,
        }


@dataclass(frozen=True)
class Rounding:
    """How the allocator rounds a tensor's size to a request."""

    backend: Backend = Backend.CUDA
    power2_divisions: int | None = None  # roundup_power2_divisions, where it was set

    def driver_request(self, size_bytes: int) -> int:
        """Return the bytes requested from the driver when no cached block fits `size_bytes`."""
        if self.backend in _EXACT_BACKENDS:
            return size_bytes
        if self.backend is Backend.NPU:
            size_bytes += _NPU_PADDING
        rounded = self._round(size_bytes)
        if rounded <= _SMALL_REQUEST:
            return _SMALL_SEGMENT
        if rounded < _LARGE_REQUEST:
            return _LARGE_SEGMENT
        return -(-rounded // _LARGE_STEP) * _LARGE_STEP

    def _round(self, size_bytes: int) -> int:
        divisions = self.power2_divisions
        if divisions and divisions > 1 and size_bytes > _BLOCK * divisions:
            power = 1 << (size_bytes.bit_length() - 1)
            step = max(power // divisions, 1)
            return -(-size_bytes // step) * step
        return max(_BLOCK, -(-size_bytes // _BLOCK) * _BLOCK)


@dataclass(frozen=True)
class Workload:
    """The facts about a job that matching uses; None where not known."""

    ranks: int | None = None
    micro_batch: int | None = None
    sequence_length: int | None = None
    zero: bool = False
    vocab_size: int | None = None  # where no shape is known
    num_parameters: int | None = None
    hidden_size: int | None = None  # where no shape is known


def match_request(
    requested: PrintedSize,
    shape: Shape | None,
    *,
    workload: Workload,
    rounding: Rounding | None = None,
) -> tuple[Candidate, ...]:
    """Return every tensor of the job that prints as `requested`, the best match first.

    Empty for 2.00 and 20.00 MiB, the sizes of segments, which identify no tensor.
    """
    rounding = rounding or Rounding()
    if is_segment_size(requested, rounding):
        return ()
    fixed = (*_parameters(shape, workload), *_activations(shape, workload))
    found = [c for c in fixed if requested.covers(rounding.driver_request(c.size_bytes))]
    sure = Match.EXACT if requested.tolerance_bytes < MIB else Match.WITHIN_ROUNDING
    candidates = [_with_match(c, sure, requested) for c in found]
    if not any(c.role is Role.EMBEDDING and c.divided_by == 1 for c in candidates):
        candidates += _grown_vocabulary(requested, shape, rounding, sure)
    if not any(c.tokens for c in candidates):
        candidates += _solved_logits(requested, shape, workload)
        candidates += _solved_scores(requested, shape)
    return tuple(sorted(candidates, key=_rank_key))


def is_segment_size(requested: PrintedSize, rounding: Rounding) -> bool:
    """Return whether the printed size is that of a segment, which every small tensor requests."""
    if rounding.backend in _EXACT_BACKENDS:
        return False
    return any(requested.covers(size) for size in (_SMALL_SEGMENT, _LARGE_SEGMENT)) or (
        requested.size_bytes < _SMALL_SEGMENT
    )


def _with_match(candidate: Candidate, match: Match, requested: PrintedSize) -> Candidate:
    # Round numbers of tokens, heads and widths all multiply to powers of two.
    power_of_two = requested.size_bytes & (requested.size_bytes - 1) == 0
    return replace(candidate, match=match, ambiguous=power_of_two)


_ROLE_ORDER = list(Role)
_MATCH_ORDER = list(Match)


def _rank_key(candidate: Candidate) -> tuple[int, int, int, str]:
    return (
        _MATCH_ORDER.index(candidate.match),
        _ROLE_ORDER.index(candidate.role),
        candidate.divided_by,
        candidate.what,
    )


def _parameters(shape: Shape | None, workload: Workload) -> Iterable[Candidate]:
    for role, what, elements in _buffers(shape, workload):
        for dtype, size in (("bfloat16", 2), ("float32", 4)):
            yield Candidate(role, what, elements * size, dtype)
            ranks = workload.ranks or 1
            if ranks > 1 and role is not Role.FUSED_WEIGHTS:
                share = -(-elements // ranks) * size
                yield Candidate(role, f"1/{ranks} of {what}", share, dtype, divided_by=ranks)
    if workload.zero:
        for elements in _ZERO_BUCKETS:
            what = f"ZeRO bucket of {elements:,} elements"
            for dtype, size in (("bfloat16", 2), ("float32", 4)):
                yield Candidate(Role.BUCKET, what, elements * size, dtype)


def _buffers(shape: Shape | None, workload: Workload) -> Iterable[tuple[Role, str, int]]:
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
    yield Role.EMBEDDING, f"{_table_name(shape)} weight", table
    if shape.language_head and not shape.dims.tied:
        yield Role.EMBEDDING, "embedding and output projection together", 2 * table
    yield from _weights(shape)


def _weights(shape: Shape) -> Iterable[tuple[Role, str, int]]:
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


def _table_name(shape: Shape) -> str:
    return "embedding or output projection" if shape.language_head else "embedding"


def _activations(shape: Shape | None, workload: Workload) -> Iterable[Candidate]:
    if not (shape and workload.sequence_length):
        return
    batch, length, dims = workload.micro_batch or 1, workload.sequence_length, shape.dims
    tokens = batch * length
    widths = (
        (Role.LOGITS, "logits", dims.vocab_size if shape.language_head else 0),
        (Role.ACTIVATION, "MLP activation", dims.intermediate_size),
        (Role.ACTIVATION, "query activation", dims.query_size),
        (Role.ACTIVATION, "hidden states", dims.hidden_size),
    )
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        for role, what, width in widths:
            if width:
                text = f"{what} of {tokens:,} tokens"
                yield Candidate(role, text, tokens * width * size, dtype, tokens=tokens)
        scores = batch * dims.num_heads * length * length * size
        text = f"attention scores of {batch} x {dims.num_heads} heads x {length} x {length}"
        yield Candidate(Role.SCORES, text, scores, dtype, tokens=tokens)


def _grown_vocabulary(
    requested: PrintedSize, shape: Shape | None, rounding: Rounding, sure: Match
) -> list[Candidate]:
    """Return the embedding with a few tokens added, such as a padding token, if that matches."""
    if shape is None or sure is not Match.EXACT:
        return []
    for added in range(1, _MOST_ADDED_TOKENS + 1):
        rows = shape.dims.vocab_size + added
        for dtype, size in (("bfloat16", 2), ("float32", 4)):
            size_bytes = rows * shape.dims.hidden_size * size
            if requested.covers(rounding.driver_request(size_bytes)):
                text = f"{_table_name(shape)} weight with {added} token{'s' * (added > 1)} added"
                return [Candidate(Role.EMBEDDING, text, size_bytes, dtype, sure)]
    return []


def _solved_logits(
    requested: PrintedSize, shape: Shape | None, workload: Workload
) -> list[Candidate]:
    """Solve for the tokens that would make logits of this size; loose, since any size solves."""
    vocabulary = workload.vocab_size
    if shape and shape.language_head:
        vocabulary = shape.dims.vocab_size
    if not vocabulary:
        return []
    longest = (workload.sequence_length or 1 << 18) * (workload.micro_batch or 64)
    candidates = []
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        tokens = requested.size_bytes // (vocabulary * size)
        # Fewer tokens than this are no evidence: in steps of 2 MiB any request has a solution.
        if 256 <= tokens <= longest:
            text = f"logits of about {tokens:,} tokens x {vocabulary:,} words"
            candidates.append(
                Candidate(
                    Role.LOGITS, text, tokens * vocabulary * size, dtype, Match.LOOSE, 1, tokens
                )
            )
    return candidates


def _solved_scores(requested: PrintedSize, shape: Shape | None) -> list[Candidate]:
    """Solve for a round sequence length whose attention scores have this size."""
    if shape is None or requested.tolerance_bytes >= MIB:
        return []
    candidates = []
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        for length in (1 << power for power in range(15, 8, -1)):
            batch, rest = divmod(requested.size_bytes, shape.dims.num_heads * length**2 * size)
            if rest == 0 and 1 <= batch <= 64:
                text = f"attention scores of {batch} x {length} x {length} tokens, all heads"
                tokens, exact_bytes = batch * length, requested.size_bytes
                candidates.append(Candidate(Role.SCORES, text, exact_bytes, dtype, tokens=tokens))
                break
    return candidates
