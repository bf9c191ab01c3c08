"""The operations that layers are made of, with what each allocates, saves and frees.

Sizes: T = tokens of the micro-batch on one rank, S = sequence length, h = hidden size; one value takes
`value_bytes` (compute dtype), 4 where a norm or a softmax upcasts to float32.
"""

from __future__ import annotations

from typing import NamedTuple

from services.shared.memory.architecture.dimensions import BERT_LIKE, Dimensions, Family
from services.shared.memory.planning.allocation_tape import Gradient, Tape, Value
from services.shared.memory.planning.attention import Heads, Kernel
from services.shared.memory.recipe import Attention


class Tokens(NamedTuple):
    """One micro-batch as a layer sees it: its size, the compute width, and which kernels run."""

    batch: int
    sequence_length: int
    value_bytes: int
    attention: Attention
    mask: bool
    training: bool
    cpu_kernels: bool

    @property
    def total(self) -> int:
        """Padded tokens of the micro-batch."""
        return self.batch * self.sequence_length


# Heads are rotated in part, 1 / n of their width: partial_rotary_factor (Phi-3: 1, by the same code; GLM: 0.5)
# and rotary_pct (GPT-NeoX, Pythia: 0.25).
_ROTATED_DIVISOR = {Family.PHI3: 1, Family.GLM: 2, Family.GLM4: 2, Family.GPT_NEOX: 4}


# Their norms multiply by the weight before they cast down.
_FLOAT32_NORM_WEIGHT = frozenset({Family.GEMMA, Family.GEMMA2, Family.GEMMA3, Family.GPT_OSS})
# OPT drops hidden states only: attention_dropout is 0 in its configs.
_ATTENTION_DROPOUT = BERT_LIKE | {Family.GPT2, Family.GPT_BIGCODE}


class Operations:
    """Operations on one tape, with the sizes of one layer.

    `recompute` gives the layer's last operations no output: checkpointing stops before them.
    """

    def __init__(self, tape: Tape, dims: Dimensions, tokens: Tokens, *, recompute: bool) -> None:
        self.tape, self.dims, self.tokens = tape, dims, tokens
        self.count, self.value_bytes = tokens.total, tokens.value_bytes
        self.hidden_bytes = self.count * dims.hidden_size * self.value_bytes
        self.wide_bytes = self.count * dims.intermediate_size * self.value_bytes
        self.output_bytes = 0 if recompute else self.hidden_bytes
        self.float32_norm_weight = dims.family in _FLOAT32_NORM_WEIGHT
        self.sandwich = dims.family in (Family.GEMMA2, Family.GEMMA3, Family.GLM4)
        self.kernel = Kernel(
            tokens.attention,
            mask=tokens.mask or dims.family is Family.FALCON,
            dropout=dims.dropout and tokens.training and dims.family in _ATTENTION_DROPOUT,
            softcap=dims.family is Family.GEMMA2,
            sinks=dims.family is Family.GPT_OSS,
            softmax_float32=dims.family not in BERT_LIKE | {Family.GPT2},
            cpu=tokens.cpu_kernels,
            head_major_queries=dims.family in _ROTATED_DIVISOR or dims.latent is not None,
            causal=dims.family not in BERT_LIKE,
            broadcast=dims.family is Family.FALCON and dims.num_kv_heads == 1,
            narrow_values=dims.value_head_dim != dims.query_head_dim,
        )
        self.heads = Heads(
            tokens.batch,
            tokens.sequence_length,
            dims.num_heads,
            dims.num_kv_heads,
            dims.query_head_dim,
            tokens.value_bytes,
            value_head_dim=dims.value_head_dim,
        )

    def linear(
        self,
        x: Value,
        size_bytes: int,
        what: str,
        *,
        bias: bool = False,
        out_bytes: int | None = None,
    ) -> Value:
        """A matrix product: saves its input; backward makes the weight's gradient, then x's."""
        width = size_bytes // (self.count * self.value_bytes)
        inputs = x.size_bytes // (self.count * self.value_bytes)
        weights = [width * inputs * self.value_bytes, *([width * self.value_bytes] if bias else ())]
        return self.tape.op(
            what,
            size_bytes if out_bytes is None else out_bytes,
            [Gradient(x, x.size_bytes)],
            saves=[x],
            weight_bytes=weights,
        )

    def unary(self, x: Value, what: str, *, keeps_output: bool = False) -> Value:
        """An activation that saves its input, or like ReLU its output."""
        saves = () if keeps_output else (x,)
        gradient = [Gradient(x, x.size_bytes)]
        return self.tape.op(what, x.size_bytes, gradient, saves=saves, saves_out=keeps_output)

    def gelu_by_parts(self, x: Value) -> Value:
        """GPT-2's GELU, 0.5 x (1 + tanh(c (x + 0.0447 x^3))), operation by operation."""
        tape, size = self.tape, x.size_bytes
        half = tape.op("GELU", size, [Gradient(x, size)])
        cube = tape.op("GELU", size, [Gradient(x, size, (size,))], saves=[x])
        small = tape.op("GELU", size, [Gradient(cube, size)])
        tape.drop(cube)
        summed = tape.op("GELU", size, [Gradient(x, alias=True), Gradient(small, alias=True)])
        tape.drop(small)
        scaled = tape.op("GELU", size, [Gradient(summed, size)])
        tape.drop(summed)
        bounded = tape.op("GELU", size, [Gradient(scaled, size)], saves_out=True)
        tape.drop(scaled)
        shifted = tape.op("GELU", size, [Gradient(bounded, alias=True)])
        tape.drop(bounded)
        both = [Gradient(half, size), Gradient(shifted, size)]
        out = tape.op("GELU", size, both, saves=[half, shifted])
        tape.drop(half, shifted)
        return out

    def add(self, left: Value, right: Value, out_bytes: int) -> Value:
        """A sum: saves nothing, passes its gradient on to both."""
        both = [Gradient(left, alias=True), Gradient(right, alias=True)]
        return self.tape.op("residual", out_bytes, both)

    def dropout(self, x: Value) -> Value:
        """Dropout in training: a mask of one byte per value, or of x's width with CPU kernels; releases `x`."""
        if not (self.dims.dropout and self.tokens.training):
            return x
        mask_bytes = x.size_bytes // (1 if self.tokens.cpu_kernels else self.value_bytes)
        out = self.tape.op(
            "dropout", x.size_bytes, [Gradient(x, x.size_bytes)], also_saves=[mask_bytes]
        )
        self.tape.drop(x)
        return out

    def layer_norm(self, x: Value, what: str) -> Value:
        """A fused LayerNorm: saves its input, mean and inverse deviation."""
        bias = 0 if self.dims.family is Family.MODERNBERT else 1
        width = self.dims.hidden_size * self.value_bytes
        return self.tape.op(
            what,
            x.size_bytes,
            [Gradient(x, x.size_bytes)],
            saves=[x],
            also_saves=[4 * self.count, 4 * self.count],
            weight_bytes=[width] * (1 + bias),
        )

    def rms_norm(self, x: Value, width: int, rows: int, what: str) -> Value:
        """An unfused RMS norm in float32, over `rows` vectors of `width` a token."""
        tape, count = self.tape, self.count * rows
        wide, row = 4 * count * width, 4 * count
        upcast = self.upcast(x, wide, what)
        squared = tape.op(what, wide, [Gradient(upcast, wide, (wide, wide))], saves=[upcast])
        mean = tape.op(what, row, [Gradient(squared, wide)])
        tape.drop(squared)
        shifted = tape.op(what, row, [Gradient(mean, alias=True)])
        inverse = tape.op(what, row, [Gradient(shifted, row)], saves_out=True)
        tape.drop(shifted)
        scaled = tape.op(
            what,
            wide,
            [Gradient(upcast, wide), Gradient(inverse, row, (wide,))],
            saves=[upcast, inverse],
        )
        tape.drop(upcast)
        if self.float32_norm_weight:
            out = self._float32_weight(scaled, x, width, what)
            tape.drop(scaled)
        else:
            narrow = self.downcast(scaled, x.size_bytes, what)
            out = tape.op(
                what,
                x.size_bytes,
                [Gradient(narrow, x.size_bytes, (x.size_bytes,))],
                saves=[narrow],
                weight_bytes=[width * self.value_bytes],
            )
            tape.drop(narrow, scaled)
        tape.drop(mean, inverse)
        return out

    def upcast(self, x: Value, wide: int, what: str) -> Value:
        """Cast up, or return the same tensor; the caller still holds `x`."""
        if x.size_bytes == wide:
            x.holders += 1
            return x
        return self.tape.op(what, wide, [Gradient(x, x.size_bytes)])

    def downcast(self, x: Value, size_bytes: int, what: str) -> Value:
        """Cast down, or return the same tensor; the caller still holds `x`."""
        if x.size_bytes == size_bytes:
            x.holders += 1
            return x
        return self.tape.op(what, size_bytes, [Gradient(x, x.size_bytes)])

    def _float32_weight(self, scaled: Value, x: Value, width: int, what: str) -> Value:
        """Multiply by the norm's weight (Gemma: one more than it) in float32, and cast down afterwards."""
        wide = scaled.size_bytes
        product = self.tape.op(
            what,
            wide,
            [Gradient(scaled, wide, (wide,))],
            saves=[scaled],
            weight_bytes=[4 * width],
        )
        if x.size_bytes == wide:
            return product
        out = self.tape.op(what, x.size_bytes, [Gradient(product, wide)])
        self.tape.drop(product)
        return out

    def norm_heads(self, x: Value, heads: int) -> Value:
        """The RMS norm of each query or key head; releases `x`."""
        normed = self.rms_norm(x, self.dims.head_dim, heads, "head norm")
        self.tape.drop(x)
        return normed

    def output_norm(self, x: Value, what: str) -> Value:
        """The norm behind a block, as in Gemma 2 and 3; releases `x`."""
        normed = self.rms_norm(x, self.dims.hidden_size, 1, what)
        self.tape.drop(x)
        return normed

    def apply_rope(self, x: Value) -> Value:
        """x * cos + rotate_half(x) * sin: saves nothing but the tables of the positions.

        Where only a part of each head is rotated, the rest is concatenated to it in a new tensor.
        """
        return self.apply_rope_of(x, x.size_bytes)

    def apply_rope_of(self, x: Value, whole: int) -> Value:
        """The same for `x` of `whole` bytes, which a view has none of its own of."""
        tape = self.tape
        size = whole // _ROTATED_DIVISOR.get(self.dims.family, 1)
        cosine = tape.op("rotary", size, [Gradient(x, size)])
        rotated = tape.op("rotary", size, [Gradient(x, size, (size,))], extra_bytes=[size // 2])
        sine = tape.op("rotary", size, [Gradient(rotated, size)])
        tape.drop(rotated)
        both = [Gradient(cosine, alias=True), Gradient(sine, alias=True)]
        out = tape.op("rotary", size, both)
        tape.drop(cosine, sine)
        if self.dims.family not in _ROTATED_DIVISOR:
            return out
        concatenated = tape.op(
            "rotary", whole, [Gradient(out, alias=True), Gradient(x, alias=True)]
        )
        tape.drop(out)
        return concatenated

    def rotate_pairs(self, x: Value) -> Value:
        """cat(x1 cos - x2 sin, x2 cos + x1 sin), where x1 and x2 are the halves of each head."""
        tape, half = self.tape, x.size_bytes // 2
        first, second = tape.split("rotary", x, (half, half))
        parts = []
        for left, right in ((first, second), (second, first)):
            cosine = tape.op("rotary", half, [Gradient(left, half)])
            sine = tape.op("rotary", half, [Gradient(right, half)])
            both = [Gradient(cosine, alias=True), Gradient(sine, alias=True)]
            parts.append(tape.op("rotary", half, both))
            tape.drop(cosine, sine)
        out = tape.op("rotary", x.size_bytes, [Gradient(part, alias=True) for part in parts])
        tape.drop(*parts, first, second)
        return out

    def apply_rope_in_float32(self, x: Value) -> Value:
        """ModernBERT rotates in float32, and upcasts the input once for each of the two products."""
        tape, size = self.tape, x.size_bytes
        wide = size * 4 // self.value_bytes
        upcast = tape.op("rotary", wide, [Gradient(x, size)])
        cosine = tape.op("rotary", wide, [Gradient(upcast, wide)])
        tape.drop(upcast)
        upcast = tape.op("rotary", wide, [Gradient(x, size)])
        rotated = tape.op(
            "rotary", wide, [Gradient(upcast, wide, (wide,))], extra_bytes=[wide // 2]
        )
        tape.drop(upcast)
        sine = tape.op("rotary", wide, [Gradient(rotated, wide)])
        tape.drop(rotated)
        both = [Gradient(cosine, alias=True), Gradient(sine, alias=True)]
        out = tape.op("rotary", wide, both)
        tape.drop(cosine, sine)
        return out

    def fused_projection(self, x: Value) -> tuple[Value, Value, Value]:
        """One product for q, k and v; the three are views whose gradients are concatenated."""
        tape, heads = self.tape, self.heads
        total = heads.query_bytes + 2 * heads.key_bytes
        fused = self.linear(x, total, "query, key and value", bias=self.dims.attention_bias)
        sizes = (heads.query_bytes, heads.key_bytes, heads.key_bytes)
        query, key, value = tape.split("query, key and value", fused, sizes)
        tape.drop(fused)
        return query, key, value

    def add_and_norm(self, x: Value, y: Value, what: str) -> Value:
        """The LayerNorm of a residual sum; releases `y`."""
        summed = self.add(x, y, self.hidden_bytes)
        out = self.layer_norm(summed, f"{what} norm")
        self.tape.drop(summed, y)
        return out
