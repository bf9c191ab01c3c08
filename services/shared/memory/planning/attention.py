"""The attention core as a sequence of allocations: fused kernels, plain operations, math kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from services.shared.memory.planning.allocation_tape import Gradient, Tape, Value
from services.shared.memory.recipe import Attention


class Kernel(NamedTuple):
    """The requested attention kernel, and what determines its buffers.

    `head_major_queries`: queries are contiguous out head by head. The CPU's kernel then returns its output
    in that layout, and the output projection needs a copy; other kernels return it token by token.
    """

    requested: Attention
    mask: bool
    dropout: bool
    softmax_float32: bool
    cpu: bool
    head_major_queries: bool = False
    causal: bool = True
    narrow_values: bool = False
    broadcast: bool = False
    softcap: bool = False
    sinks: bool = False

    @property
    def effective(self) -> Attention:
        """The kernel that runs: torch falls back to math where keys are broadcast to queries and, on CPUs,
        for dropout and for values of another width than the keys.
        """
        unknown = self.broadcast or (self.cpu and (self.dropout or self.narrow_values))
        return Attention.MATH if self.requested is Attention.SDPA and unknown else self.requested


class Heads(NamedTuple):
    """The sizes of one layer's heads, for one micro-batch."""

    batch: int
    sequence_length: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_bytes: int
    value_head_dim: int

    @property
    def tokens(self) -> int:
        """Padded tokens of the micro-batch."""
        return self.batch * self.sequence_length

    @property
    def query_bytes(self) -> int:
        """All queries."""
        return self.tokens * self.num_heads * self.head_dim * self.value_bytes

    @property
    def key_bytes(self) -> int:
        """All keys, which is all values, before they are repeated for the query heads."""
        return self.tokens * self.num_kv_heads * self.head_dim * self.value_bytes

    @property
    def context_bytes(self) -> int:
        """The output: one value head for each query head."""
        return self.tokens * self.num_heads * self.value_head_dim * self.value_bytes

    @property
    def scores(self) -> int:
        """Number of scores: one for each head and pair of positions."""
        return self.batch * self.num_heads * self.sequence_length**2

    @property
    def mask_bytes(self) -> int:
        """An additive mask in the compute dtype, one for all heads."""
        return self.batch * self.sequence_length**2 * self.value_bytes


def attend(tape: Tape, heads: Heads, kernel: Kernel, inputs: tuple[Value, Value, Value]) -> Value:
    """Run attention over (query, key, value), which the caller releases; return the context."""
    query, key, value = inputs
    grouped = heads.num_kv_heads < heads.num_heads
    # transformers leaves grouped heads to sdpa only where no mask is given.
    repeats = (
        grouped
        and not kernel.broadcast
        and (kernel.mask or kernel.sinks or kernel.requested is Attention.EAGER)
    )
    if repeats:
        key, value = (_repeat_heads(tape, heads, x) for x in (key, value))
    if kernel.sinks:
        context = _with_sinks(tape, heads, (query, key, value))
    else:
        context = _KERNELS[kernel.effective](tape, heads, kernel, (query, key, value))
    if repeats:
        tape.drop(key, value)
    return context


def _repeat_heads(tape: Tape, heads: Heads, x: Value) -> Value:
    return tape.op("repeated keys and values", heads.query_bytes, [Gradient(x, x.size_bytes)])


def _fused(tape: Tape, heads: Heads, kernel: Kernel, inputs: _Inputs) -> Value:
    """A flash or memory-efficient kernel: saves its inputs, its output and a row statistic."""
    also = [4 * heads.tokens * heads.num_heads]
    if kernel.mask:
        also.append(heads.mask_bytes)
    context = tape.op(
        "attention",
        heads.context_bytes,
        [Gradient(x, x.size_bytes) for x in inputs],
        saves=inputs,
        saves_out=True,
        also_saves=also,
    )
    if not (kernel.head_major_queries and kernel.cpu):
        return context
    contiguous = tape.op("attention", heads.context_bytes, [Gradient(context, alias=True)])
    tape.drop(context)
    return contiguous


def _eager(tape: Tape, heads: Heads, kernel: Kernel, inputs: _Inputs) -> Value:
    """transformers' own attention: scores in the compute dtype, softmax in float32 for decoders."""
    query, key, value = inputs
    low, high = heads.scores * heads.value_bytes, heads.scores * 4
    contiguous = tape.op("attention queries", heads.query_bytes, [Gradient(query, alias=True)])
    scores = tape.op(
        "attention scores",
        low,
        [Gradient(key, heads.query_bytes), Gradient(contiguous, heads.query_bytes)],
        saves=[contiguous, key],
    )
    tape.drop(contiguous)
    scaled = tape.op("attention scores", low, [Gradient(scores, low)])
    tape.drop(scores)
    if kernel.softcap:
        scaled = _softcap(tape, scaled, low)
    if kernel.mask:
        masked = tape.op("masked attention scores", low, [Gradient(scaled, alias=True)])
        tape.drop(scaled)
        scaled = masked
    weights = _softmax(tape, scaled, low, high if kernel.softmax_float32 else low)
    if kernel.dropout:
        weights = _attention_dropout(tape, heads, kernel, weights)
    context = tape.op(
        "attention context",
        heads.query_bytes,
        [Gradient(value, heads.query_bytes), Gradient(weights, low)],
        saves=[weights, value],
    )
    out = tape.op("attention context", heads.query_bytes, [Gradient(context, heads.query_bytes)])
    tape.drop(context)
    tape.hold(weights)  # returned beside the context
    return out


def _with_sinks(tape: Tape, heads: Heads, inputs: _Inputs) -> Value:
    """GPT-OSS: one more column of learned scores, and the largest score of a row subtracted from it."""
    query, key, value = inputs
    rows = heads.scores // heads.sequence_length
    low, wide = heads.scores * heads.value_bytes, (heads.scores + rows) * heads.value_bytes
    both = [Gradient(key, heads.query_bytes), Gradient(query, heads.query_bytes)]
    scores = tape.op("attention scores", low, both, saves=[query, key])
    scaled = tape.op("attention scores", low, [Gradient(scores, low)])
    tape.drop(scores)
    masked = tape.op("masked attention scores", low, [Gradient(scaled, alias=True)])
    tape.drop(scaled)
    joined = tape.op("scores with sinks", wide, [Gradient(masked, alias=True)])
    largest = tape.op(
        "largest scores",
        rows * heads.value_bytes,
        [Gradient(joined, wide, (wide,))],
        also_saves=[8 * rows],
    )
    centred = tape.op(
        "scores with sinks",
        wide,
        [Gradient(joined, alias=True), Gradient(largest, rows * heads.value_bytes, (wide,))],
    )
    tape.drop(largest, joined)
    weights = tape.op("attention softmax", wide, [Gradient(centred, wide)], saves_out=True)
    tape.drop(masked)
    without_sinks = tape.op("attention weights", 0, [Gradient(weights, wide)])
    context = tape.op(
        "attention context",
        heads.query_bytes,
        [Gradient(value, heads.query_bytes), Gradient(without_sinks, low)],
        saves=[weights, value],
    )
    out = tape.op("attention context", heads.query_bytes, [Gradient(context, heads.query_bytes)])
    tape.drop(context, centred, without_sinks)
    tape.hold(weights)
    return out


def _softcap(tape: Tape, scores: Value, low: int) -> Value:
    """Gemma 2's cap * tanh(scores / cap); releases `scores`."""
    divided = tape.op("attention scores", low, [Gradient(scores, low)])
    tape.drop(scores)
    bounded = tape.op("attention scores", low, [Gradient(divided, low)], saves_out=True)
    tape.drop(divided)
    out = tape.op("attention scores", low, [Gradient(bounded, low)])
    tape.drop(bounded)
    return out


def _softmax(tape: Tape, scores: Value, low: int, high: int) -> Value:
    """Softmax of `scores` (released here), through float32 where `high` exceeds `low`."""
    if high == low:
        weights = tape.op("attention softmax", low, [Gradient(scores, low)], saves_out=True)
        tape.drop(scores)
        return weights
    upcast = tape.op("attention scores in float32", high, [Gradient(scores, low)])
    weights = tape.op("attention softmax", high, [Gradient(upcast, high)], saves_out=True)
    tape.drop(upcast)
    lowered = tape.op("attention weights", low, [Gradient(weights, high)])
    tape.drop(weights, scores)
    return lowered


def _attention_dropout(tape: Tape, heads: Heads, kernel: Kernel, weights: Value) -> Value:
    mask_bytes = weights.size_bytes if kernel.cpu else heads.scores
    out = tape.op(
        "attention dropout",
        weights.size_bytes,
        [Gradient(weights, weights.size_bytes)],
        also_saves=[mask_bytes],
    )
    tape.drop(weights)
    return out


def _math(tape: Tape, heads: Heads, kernel: Kernel, inputs: _Inputs) -> Value:
    """torch's math kernel: everything upcast to float32, whole scores, nothing recomputed."""
    scores, ratio = heads.scores * 4, 4 // heads.value_bytes
    context_bytes = heads.context_bytes * ratio
    masks = [tape.op("attention mask", heads.mask_bytes)] if kernel.mask else []
    upcast = [
        tape.op("attention inputs", x.size_bytes * ratio, [Gradient(x, x.size_bytes)])
        for x in inputs
    ]
    sizes = [x.size_bytes for x in upcast]
    if kernel.causal and not kernel.mask:
        masks.append(tape.op("attention mask", 4 * heads.sequence_length**2))
    scaled = [
        tape.op("attention inputs", size, [Gradient(x, size)])
        for x, size in zip(upcast[:2], sizes[:2], strict=True)
    ]
    if kernel.head_major_queries:
        factors = scaled
    else:
        whole = sizes[0]  # of the queries, to which one key head is expanded
        factors = [_expanded(tape, x, whole, copied=heads.batch > 1) for x in scaled]
    gradients = [Gradient(x, max(x.size_bytes, sizes[0])) for x in factors]
    product = tape.op("attention scores", scores, gradients, saves=factors)
    # The scaled queries are still named.
    tape.drop(scaled[1], *(factors if factors is not scaled else ()))
    if masks:
        masked = tape.op("masked attention scores", scores, [Gradient(product, alias=True)])
        tape.drop(product)
        product = masked
    weights = tape.op("attention softmax", scores, [Gradient(product, scores)], saves_out=True)
    tape.drop(product)
    if kernel.dropout:
        weights = _attention_dropout(tape, heads, kernel, weights)
    lowered = tape.op("attention weights", heads.scores * heads.value_bytes)
    whole_value = max(context_bytes, sizes[2])
    contiguous_value = _expanded(tape, upcast[2], whole_value, copied=heads.batch > 1)
    context = tape.op(
        "attention context",
        context_bytes,
        [Gradient(contiguous_value, whole_value), Gradient(weights, scores)],
        saves=[weights, contiguous_value],
    )
    out = tape.op("attention context", heads.context_bytes, [Gradient(context, context_bytes)])
    tape.drop(context, scaled[0], *upcast, lowered, weights, contiguous_value, *masks)
    final = tape.op("attention context", heads.context_bytes, [Gradient(out, alias=True)])
    tape.drop(out)
    return final


def _expanded(tape: Tape, x: Value, size_bytes: int, *, copied: bool) -> Value:
    """A contiguous copy, of a single head once for each query head.

    A batch of one text needs no copy of its single head: the expanded heads are a view of it.
    """
    if x.size_bytes == size_bytes:
        return tape.op("attention inputs", size_bytes, [Gradient(x, alias=True)])
    return tape.op("attention inputs", size_bytes if copied else 0, [Gradient(x, x.size_bytes)])


_Inputs = tuple[Value, Value, Value]
_KERNELS: dict[Attention, Callable[[Tape, Heads, Kernel, _Inputs], Value]] = {
    Attention.SDPA: _fused,
    Attention.EAGER: _eager,
    Attention.MATH: _math,
}
