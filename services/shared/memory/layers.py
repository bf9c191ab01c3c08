"""The operations of one transformer layer, family by family, as transformers runs them.

Sizes: T = tokens of the micro-batch on one rank, S = sequence length, h = hidden size, q and kv =
width of all query and key heads; one value takes `c` bytes (compute dtype), 4 where a norm or a
softmax raises to float32. Each function was read off the operations that a dry run of the family
dispatches (transformers 5.12 to 5.24, torch 2.5 and 2.13, CPU kernels for a fake device).
"""

from __future__ import annotations

from typing import NamedTuple

from services.shared.memory.attention import Heads, Kernel, attend
from services.shared.memory.dimensions import (
    BERT_LIKE,
    LLAMA_LIKE,
    Dimensions,
    Family,
)
from services.shared.memory.errors import InvalidInput
from services.shared.memory.recipe import Attention
from services.shared.memory.tape import Gradient, Tape, Value

PLANNED_FAMILIES = (
    LLAMA_LIKE
    | BERT_LIKE
    | {Family.PHI3, Family.MODERNBERT, Family.GPT_NEOX, Family.GPT_BIGCODE, Family.OPT}
)


class Tokens(NamedTuple):
    """What passes a layer: the batch, the compute width, and which kernels run."""

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


def check_planned(dims: Dimensions) -> None:
    """Raise InvalidInput for a family whose activations are not described here."""
    if dims.family not in PLANNED_FAMILIES:
        raise InvalidInput(
            "model",
            f"the tensors of {dims.family} are known, its activations are not",
            accepted=sorted(str(family) for family in PLANNED_FAMILIES),
        )


def play_layer(tape: Tape, dims: Dimensions, tokens: Tokens, x: Value, *, recompute: bool) -> Value:
    """Run one layer on `tape` from its input `x`; return its output.

    `recompute` leaves out what checkpointing skips: everything after the last saved tensor.
    """
    layer = _Layer(tape, dims, tokens, recompute=recompute)
    if dims.family in BERT_LIKE:
        return layer.post_norm(x)
    if dims.family in LLAMA_LIKE or dims.family is Family.PHI3:
        return layer.gated_decoder(x)
    if dims.family is Family.MODERNBERT:
        return layer.modern_encoder(x)
    return layer.pre_norm(x)


def play_final_norm(tape: Tape, dims: Dimensions, tokens: Tokens, x: Value) -> Value:
    """Run what follows the last layer; models without a final norm hand `x` on."""
    layer = _Layer(tape, dims, tokens, recompute=False)
    if dims.family in BERT_LIKE:
        return x
    if dims.family in LLAMA_LIKE or dims.family is Family.PHI3:
        return layer.rms_norm(x, dims.hidden_size, 1, "final norm")
    return layer.layer_norm(x, "final norm")


# One part in so many of each head is turned: partial_rotary_factor (Phi-3: whole heads, but written
# as a part) and rotary_pct (GPT-NeoX, Pythia: 0.25).
_TURNED = {Family.PHI3: 1, Family.GPT_NEOX: 4}


# OPT drops hidden states only: attention_dropout is 0 in its configs.
_ATTENTION_DROPOUT = BERT_LIKE | {Family.GPT_BIGCODE}


class _Layer:
    """Operations with the sizes of one layer at hand."""

    def __init__(self, tape: Tape, dims: Dimensions, tokens: Tokens, *, recompute: bool) -> None:
        self.tape, self.dims, self.tokens = tape, dims, tokens
        self.count, self.value_bytes = tokens.total, tokens.value_bytes
        self.hidden_bytes = self.count * dims.hidden_size * self.value_bytes
        self.wide_bytes = self.count * dims.intermediate_size * self.value_bytes
        self.output_bytes = 0 if recompute else self.hidden_bytes
        self.gemma = dims.family in (Family.GEMMA, Family.GEMMA2, Family.GEMMA3)
        self.sandwich = dims.family in (Family.GEMMA2, Family.GEMMA3)
        self.kernel = Kernel(
            tokens.attention,
            mask=tokens.mask,
            dropout=dims.dropout and tokens.training and dims.family in _ATTENTION_DROPOUT,
            softcap=dims.family is Family.GEMMA2,
            softmax_float32=dims.family not in BERT_LIKE,
            cpu=tokens.cpu_kernels,
            lays_out=dims.family in _TURNED,
        )
        self.heads = Heads(
            tokens.batch,
            tokens.sequence_length,
            dims.num_heads,
            dims.num_kv_heads,
            dims.head_dim,
            tokens.value_bytes,
        )

    # -- whole layers ---------------------------------------------------------------------------

    def gated_decoder(self, x: Value) -> Value:
        """Llama and its kin: norm, attention, add, norm, gated MLP, add."""
        tape, dims = self.tape, self.dims
        normed = self.rms_norm(x, dims.hidden_size, 1, "input norm")
        attended = self.rotary_attention(normed)
        tape.drop(normed)
        if self.sandwich:
            attended = self._renormed(attended, "post-attention norm")
        middle = self.add(x, attended, self.hidden_bytes)
        tape.drop(attended)
        normed = self.rms_norm(middle, dims.hidden_size, 1, "MLP norm")
        # Gemma 2 and 3 end in a norm, which saves: nothing of the MLP is skipped on recomputing.
        output_bytes = self.hidden_bytes if self.sandwich else self.output_bytes
        mlp = self.gated_mlp(normed, output_bytes)
        tape.drop(normed)
        if self.sandwich:
            mlp = self._renormed(mlp, "post-MLP norm")
        out = self.add(middle, mlp, self.output_bytes)
        tape.drop(middle, mlp)
        return out

    def post_norm(self, x: Value) -> Value:
        """BERT and its kin: attention, add and norm, MLP, add and norm."""
        tape, dims = self.tape, self.dims
        attended = self.plain_attention(x)
        if dims.family is not Family.DISTILBERT:
            attended = self.dropout(attended)
        middle = self._added_and_normed(x, attended, "attention")
        wide = self.linear(middle, self.wide_bytes, "MLP up", bias=True)
        active = self.unary(wide, "GELU")
        tape.drop(wide)
        narrow = self.linear(active, self.hidden_bytes, "MLP down", bias=True)
        tape.drop(active)
        out = self._added_and_normed(middle, self.dropout(narrow), "MLP")
        tape.drop(middle)
        return out

    def pre_norm(self, x: Value) -> Value:
        """GPT-NeoX, GPT-BigCode and OPT: LayerNorms in front, an MLP without a gate."""
        tape = self.tape
        # GPT-NeoX runs attention and MLP side by side from the same input.
        parallel = self.dims.family is Family.GPT_NEOX
        normed = self.layer_norm(x, "input norm")
        attended = self.dropout(self.plain_attention(normed))
        tape.drop(normed)
        middle = x
        if not parallel:
            middle = self.add(x, attended, self.hidden_bytes)
            tape.drop(attended)
        normed = self.layer_norm(middle, "MLP norm")
        mlp = self.plain_mlp(normed)
        if parallel:
            summed = self.add(mlp, attended, self.hidden_bytes)
            tape.drop(mlp, attended)
            mlp = summed
        out = self.add(middle, mlp, self.output_bytes)
        tape.drop(normed, mlp, *(() if parallel else (middle,)))
        return out

    def modern_encoder(self, x: Value) -> Value:
        """ModernBERT: pre-norm, fused q/k/v with rotary positions, fused gate and up."""
        tape = self.tape
        normed = self.layer_norm(x, "input norm")
        attended = self.rotary_attention(normed)
        tape.drop(normed)
        middle = self.add(x, attended, self.hidden_bytes)
        tape.drop(attended)
        normed = self.layer_norm(middle, "MLP norm")
        mlp = self.gated_mlp(normed, self.output_bytes)
        tape.drop(normed)
        out = self.add(middle, mlp, self.output_bytes)
        tape.drop(middle, mlp)
        return out

    # -- blocks ---------------------------------------------------------------------------------

    def rotary_attention(self, normed: Value) -> Value:
        """q/k/v, q/k norms where there are any, rotary positions, attention, output projection."""
        tape, dims, heads = self.tape, self.dims, self.heads
        fused = dims.family in (Family.PHI3, Family.MODERNBERT)
        if fused:
            query, key, value = self._fused_projection(normed)
        else:
            query = self.linear(normed, heads.query_bytes, "query", bias=dims.attention_bias)
            if dims.qk_norm:
                query = self._head_normed(query, dims.num_heads)
            key = self.linear(normed, heads.key_bytes, "key", bias=dims.attention_bias)
            if dims.qk_norm:
                key = self._head_normed(key, dims.num_kv_heads)
            value = self.linear(normed, heads.key_bytes, "value", bias=dims.attention_bias)
        if dims.family is Family.MODERNBERT and self.value_bytes < 4:
            raised = self._rotate_raised(query), self._rotate_raised(key)
            turned_query = self._lowered(raised[0], heads.query_bytes, "rotary")
            turned_key = self._lowered(raised[1], heads.key_bytes, "rotary")
            tape.drop(*raised)
        else:
            turned_query, turned_key = self._rotate(query), self._rotate(key)
        tape.drop(query, key)
        context = attend(tape, heads, self.kernel, (turned_query, turned_key, value))
        out = self.linear(context, self.hidden_bytes, "attention output", bias=dims.output_bias)
        tape.drop(context, turned_query, turned_key, value)
        return out

    def plain_attention(self, x: Value) -> Value:
        """Attention without positions of its own: three projections, or one fused."""
        tape, dims, heads = self.tape, self.dims, self.heads
        if dims.family in BERT_LIKE or dims.family is Family.OPT:
            parts = [
                self.linear(x, heads.query_bytes, name, bias=dims.attention_bias)
                for name in ("query", "key", "value")
            ]
            query, key, value = parts
        else:
            query, key, value = self._fused_projection(x)
        if dims.family is Family.GPT_NEOX:
            turned = self._rotate(query), self._rotate(key)
            tape.drop(query, key)
            query, key = turned
        context = attend(tape, heads, self.kernel, (query, key, value))
        out = self.linear(context, self.hidden_bytes, "attention output", bias=dims.output_bias)
        tape.drop(context, query, key, value)
        return out

    def gated_mlp(self, x: Value, output_bytes: int) -> Value:
        """down(act(gate(x)) * up(x)), gate and up fused where the family fuses them."""
        tape, dims = self.tape, self.dims
        if dims.family in (Family.PHI3, Family.MODERNBERT):
            both = self.linear(x, 2 * self.wide_bytes, "MLP gate and up", bias=dims.mlp_bias)
            gate, up = tape.split("MLP gate and up", both, (self.wide_bytes, self.wide_bytes))
            tape.drop(both)
            active = self.unary(gate, "activation")
        else:
            gate = self.linear(x, self.wide_bytes, "MLP gate", bias=dims.mlp_bias)
            active = self.unary(gate, "activation")
            up = self.linear(x, self.wide_bytes, "MLP up", bias=dims.mlp_bias)
        tape.drop(gate)
        product = tape.op(
            "MLP product",
            self.wide_bytes,
            [Gradient(active, self.wide_bytes), Gradient(up, self.wide_bytes)],
            saves=[active, up],
        )
        tape.drop(active, up)
        down = self.linear(
            product, self.hidden_bytes, "MLP down", bias=dims.mlp_bias, out_bytes=output_bytes
        )
        tape.drop(product)
        return down

    def plain_mlp(self, x: Value) -> Value:
        """down(act(up(x))) with a dropout behind."""
        bias = self.dims.mlp_bias
        wide = self.linear(x, self.wide_bytes, "MLP up", bias=bias)
        active = self.unary(wide, "activation", keeps_output=self.dims.family is Family.OPT)
        self.tape.drop(wide)
        out = self.linear(active, self.hidden_bytes, "MLP down", bias=bias)
        self.tape.drop(active)
        return self.dropout(out)

    # -- operations -----------------------------------------------------------------------------

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

    def add(self, left: Value, right: Value, out_bytes: int) -> Value:
        """A sum: nothing saved, the gradient handed on to both."""
        both = [Gradient(left, alias=True), Gradient(right, alias=True)]
        return self.tape.op("residual", out_bytes, both)

    def dropout(self, x: Value) -> Value:
        """Dropout in training: a mask of one byte a value, of x's width with CPU kernels."""
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
        """An RMS norm written out in float32, over `rows` vectors of `width` a token."""
        tape, count = self.tape, self.count * rows
        wide, row = 4 * count * width, 4 * count
        raised = self._raised(x, wide, what)
        squared = tape.op(what, wide, [Gradient(raised, wide, (wide, wide))], saves=[raised])
        mean = tape.op(what, row, [Gradient(squared, wide)])
        tape.drop(squared)
        shifted = tape.op(what, row, [Gradient(mean, alias=True)])
        inverse = tape.op(what, row, [Gradient(shifted, row)], saves_out=True)
        tape.drop(shifted)
        scaled = tape.op(
            what,
            wide,
            [Gradient(raised, wide), Gradient(inverse, row, (wide,))],
            saves=[raised, inverse],
        )
        tape.drop(raised)
        if self.gemma:
            out = self._gemma_weight(scaled, x, width, what)
            tape.drop(scaled)
        else:
            lowered = self._lowered(scaled, x.size_bytes, what)
            out = tape.op(
                what,
                x.size_bytes,
                [Gradient(lowered, x.size_bytes, (x.size_bytes,))],
                saves=[lowered],
                weight_bytes=[width * self.value_bytes],
            )
            tape.drop(lowered, scaled)
        tape.drop(mean, inverse)
        return out

    def _raised(self, x: Value, wide: int, what: str) -> Value:
        if x.size_bytes == wide:
            x.holders += 1
            return x
        return self.tape.op(what, wide, [Gradient(x, x.size_bytes)])

    def _lowered(self, x: Value, size_bytes: int, what: str) -> Value:
        """Cast down, or name the same tensor again; `x` stays named."""
        if x.size_bytes == size_bytes:
            x.holders += 1
            return x
        return self.tape.op(what, size_bytes, [Gradient(x, x.size_bytes)])

    def _gemma_weight(self, scaled: Value, x: Value, width: int, what: str) -> Value:
        """Gemma multiplies by (1 + weight) in float32 and only then lowers."""
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

    def _head_normed(self, x: Value, heads: int) -> Value:
        normed = self.rms_norm(x, self.dims.head_dim, heads, "head norm")
        self.tape.drop(x)
        return normed

    def _renormed(self, x: Value, what: str) -> Value:
        normed = self.rms_norm(x, self.dims.hidden_size, 1, what)
        self.tape.drop(x)
        return normed

    def _rotate(self, x: Value) -> Value:
        """x * cos + rotate_half(x) * sin: nothing saved but the positions' own tables.

        Where only a part of each head turns, the rest is joined to it in a new tensor.
        """
        tape, whole = self.tape, x.size_bytes
        size = whole // _TURNED.get(self.dims.family, 1)
        straight = tape.op("rotary", size, [Gradient(x, size)])
        turned = tape.op("rotary", size, [Gradient(x, size, (size,))], extra_bytes=[size // 2])
        sine = tape.op("rotary", size, [Gradient(turned, size)])
        tape.drop(turned)
        both = [Gradient(straight, alias=True), Gradient(sine, alias=True)]
        out = tape.op("rotary", size, both)
        tape.drop(straight, sine)
        if self.dims.family not in _TURNED:
            return out
        joined = tape.op("rotary", whole, [Gradient(out, alias=True), Gradient(x, alias=True)])
        tape.drop(out)
        return joined

    def _rotate_raised(self, x: Value) -> Value:
        """ModernBERT turns in float32, raising the input once for each of the two products."""
        tape, size = self.tape, x.size_bytes
        wide = size * 4 // self.value_bytes
        raised = tape.op("rotary", wide, [Gradient(x, size)])
        straight = tape.op("rotary", wide, [Gradient(raised, wide)])
        tape.drop(raised)
        raised = tape.op("rotary", wide, [Gradient(x, size)])
        turned = tape.op("rotary", wide, [Gradient(raised, wide, (wide,))], extra_bytes=[wide // 2])
        tape.drop(raised)
        sine = tape.op("rotary", wide, [Gradient(turned, wide)])
        tape.drop(turned)
        both = [Gradient(straight, alias=True), Gradient(sine, alias=True)]
        out = tape.op("rotary", wide, both)
        tape.drop(straight, sine)
        return out

    def _fused_projection(self, x: Value) -> tuple[Value, Value, Value]:
        """One product for q, k and v; the three are views whose gradients are joined."""
        tape, heads = self.tape, self.heads
        total = heads.query_bytes + 2 * heads.key_bytes
        fused = self.linear(x, total, "query, key and value", bias=self.dims.attention_bias)
        sizes = (heads.query_bytes, heads.key_bytes, heads.key_bytes)
        query, key, value = tape.split("query, key and value", fused, sizes)
        tape.drop(fused)
        return query, key, value

    def _added_and_normed(self, x: Value, y: Value, what: str) -> Value:
        summed = self.add(x, y, self.hidden_bytes)
        out = self.layer_norm(summed, f"{what} norm")
        self.tape.drop(summed, y)
        return out
