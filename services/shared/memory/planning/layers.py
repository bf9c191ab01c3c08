"""The operations of one transformer layer, family by family, as transformers runs them.

Each sequence was taken from the operations that a dry run of the family dispatches (transformers 5.12 to
5.24, torch 2.5 and 2.13, CPU kernels for a fake device).
"""

from __future__ import annotations

from services.shared.memory.architecture.dimensions import (
    BERT_LIKE,
    EXPERT_FAMILIES,
    LLAMA_LIKE,
    PHI_LIKE,
    Dimensions,
    Family,
)
from services.shared.memory.errors import InvalidInput
from services.shared.memory.planning.allocation_tape import Gradient, Tape, Value
from services.shared.memory.planning.attention import attend
from services.shared.memory.planning.experts import ExpertOperations
from services.shared.memory.planning.fused_decoders import FusedDecoders
from services.shared.memory.planning.latent_attention import LatentAttention
from services.shared.memory.planning.operations import Tokens

PLANNED_FAMILIES = (
    LLAMA_LIKE
    | BERT_LIKE
    | PHI_LIKE
    | {
        Family.MODERNBERT,
        Family.GPT2,
        Family.GPT_NEOX,
        Family.GPT_BIGCODE,
        Family.OPT,
        Family.FALCON,
        Family.BLOOM,
    }
    | EXPERT_FAMILIES
)
_GATED_DECODERS = LLAMA_LIKE | PHI_LIKE | EXPERT_FAMILIES


def check_planned(dims: Dimensions) -> None:
    """Raise InvalidInput for a family whose activations are not described here."""
    if dims.family not in PLANNED_FAMILIES:
        raise InvalidInput(
            "model",
            f"the tensors of {dims.family} are known, its activations are not",
            accepted=sorted(str(family) for family in PLANNED_FAMILIES),
        )


def play_layer(tape: Tape, dims: Dimensions, tokens: Tokens, x: Value, *, recompute: bool) -> Value:
    """Run one layer on `tape` from its input `x`; return its output. The caller releases what is held.

    `recompute` leaves out what checkpointing skips: everything after the last saved tensor.
    """
    layer = _Layer(tape, dims, tokens, recompute=recompute)
    if dims.family in BERT_LIKE:
        out = layer.post_norm(x)
    elif dims.family in _GATED_DECODERS:
        out = layer.gated_decoder(x)
    elif dims.family is Family.MODERNBERT:
        out = layer.modernbert(x)
    elif dims.family is Family.FALCON:
        out = layer.falcon(x)
    elif dims.family is Family.BLOOM:
        out = layer.bloom(x)
    else:
        out = layer.pre_norm(x)
    return out


def play_final_norm(tape: Tape, dims: Dimensions, tokens: Tokens, x: Value) -> Value:
    """Run what follows the last layer; return `x` for models without a final norm."""
    layer = _Layer(tape, dims, tokens, recompute=False)
    if dims.family in BERT_LIKE:
        return x
    if dims.family in _GATED_DECODERS:
        return layer.rms_norm(x, dims.hidden_size, 1, "final norm")
    return layer.layer_norm(x, "final norm")


class _Layer(ExpertOperations, LatentAttention, FusedDecoders):
    """A layer as the sequence of its operations."""

    def gated_decoder(self, x: Value) -> Value:
        """Llama and its derivatives: norm, attention, add, norm, gated MLP, add."""
        tape, dims = self.tape, self.dims
        normed = self.rms_norm(x, dims.hidden_size, 1, "input norm")
        attended = self.latent_attention(normed) if dims.latent else self.rotary_attention(normed)
        tape.drop(normed)
        if self.sandwich:
            attended = self.output_norm(attended, "post-attention norm")
        middle = self.add(x, attended, self.hidden_bytes)
        tape.drop(attended)
        normed = self.rms_norm(middle, dims.hidden_size, 1, "MLP norm")
        # Gemma 2 and 3 end in a norm, which saves its input: recomputing skips nothing of the MLP.
        output_bytes = self.hidden_bytes if self.sandwich else self.output_bytes
        mlp = (
            self.expert_mlp(normed, output_bytes)
            if dims.experts
            else self.gated_mlp(normed, output_bytes)
        )
        tape.drop(normed)
        if self.sandwich:
            mlp = self.output_norm(mlp, "post-MLP norm")
        out = self.add(middle, mlp, self.output_bytes)
        tape.drop(middle, mlp)
        return out

    def expert_mlp(self, x: Value, output_bytes: int) -> Value:
        """The routed experts, and the experts that all tokens share, where there are any."""
        experts = self.dims.experts
        assert experts is not None
        if not experts.shared_experts:
            return self.routed_mlp(x, output_bytes)
        route = self.route(x)
        routed = self.run_experts(x, route.weights, self.hidden_bytes)
        width = experts.shared_experts * experts.intermediate_size
        shared = self.gated_mlp(x, output_bytes, width=width)
        out = self.add(routed, shared, output_bytes)
        self.tape.drop(shared, routed, *route)
        return out

    def post_norm(self, x: Value) -> Value:
        """BERT and its derivatives: attention, add and norm, MLP, add and norm."""
        tape, dims = self.tape, self.dims
        attended = self.plain_attention(x)
        if dims.family is not Family.DISTILBERT:
            attended = self.dropout(attended)
        middle = self.add_and_norm(x, attended, "attention")
        wide = self.linear(middle, self.wide_bytes, "MLP up", bias=True)
        active = self.unary(wide, "GELU")
        tape.drop(wide)
        narrow = self.linear(active, self.hidden_bytes, "MLP down", bias=True)
        tape.drop(active)
        out = self.add_and_norm(middle, self.dropout(narrow), "MLP")
        tape.drop(middle)
        return out

    def pre_norm(self, x: Value) -> Value:
        """GPT-2, GPT-NeoX, GPT-BigCode and OPT: pre-norm with LayerNorms, an MLP without a gate."""
        tape = self.tape
        # GPT-NeoX runs attention and MLP in parallel on the same input.
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

    def modernbert(self, x: Value) -> Value:
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

    def rotary_attention(self, normed: Value) -> Value:
        """q/k/v, q/k norms where there are any, rotary positions, attention, output projection."""
        tape, dims, heads = self.tape, self.dims, self.heads
        fused = dims.family in (Family.PHI3, Family.MODERNBERT)
        if fused:
            query, key, value = self.fused_projection(normed)
        else:
            query = self.linear(normed, heads.query_bytes, "query", bias=dims.attention_bias)
            if dims.qk_norm:
                query = self.norm_heads(query, dims.num_heads)
            key = self.linear(normed, heads.key_bytes, "key", bias=dims.attention_bias)
            if dims.qk_norm:
                key = self.norm_heads(key, dims.num_kv_heads)
            value = self.linear(normed, heads.key_bytes, "value", bias=dims.attention_bias)
        if dims.family is Family.MODERNBERT and self.value_bytes < 4:
            wide = self.apply_rope_in_float32(query), self.apply_rope_in_float32(key)
            rotated_query = self.downcast(wide[0], heads.query_bytes, "rotary")
            rotated_key = self.downcast(wide[1], heads.key_bytes, "rotary")
            tape.drop(*wide)
        elif dims.family is Family.GPT_OSS:
            rotated_query, rotated_key = self.rotate_pairs(query), self.rotate_pairs(key)
        else:
            rotated_query, rotated_key = self.apply_rope(query), self.apply_rope(key)
        tape.drop(query, key)
        context = attend(tape, heads, self.kernel, (rotated_query, rotated_key, value))
        out = self.linear(context, self.hidden_bytes, "attention output", bias=dims.output_bias)
        tape.drop(context, rotated_query, rotated_key, value)
        return out

    def plain_attention(self, x: Value) -> Value:
        """Attention over three projections, or one fused; only GPT-NeoX rotates its queries and keys."""
        tape, dims, heads = self.tape, self.dims, self.heads
        if dims.family in BERT_LIKE or dims.family is Family.OPT:
            parts = [
                self.linear(x, heads.query_bytes, name, bias=dims.attention_bias)
                for name in ("query", "key", "value")
            ]
            query, key, value = parts
        else:
            query, key, value = self.fused_projection(x)
        if dims.family is Family.GPT_NEOX:
            rotated = self.apply_rope(query), self.apply_rope(key)
            tape.drop(query, key)
            query, key = rotated
        context = attend(tape, heads, self.kernel, (query, key, value))
        out = self.linear(context, self.hidden_bytes, "attention output", bias=dims.output_bias)
        tape.drop(context, query, key, value)
        return out

    def gated_mlp(self, x: Value, output_bytes: int, *, width: int | None = None) -> Value:
        """down(act(gate(x)) * up(x)), gate and up fused where the family fuses them."""
        tape, dims = self.tape, self.dims
        wide_bytes = self.count * self.value_bytes * (width or dims.intermediate_size)
        if dims.family in PHI_LIKE or dims.family is Family.MODERNBERT:
            both = self.linear(x, 2 * wide_bytes, "MLP gate and up", bias=dims.mlp_bias)
            gate, up = tape.split("MLP gate and up", both, (wide_bytes, wide_bytes))
            tape.drop(both)
            active = self.unary(gate, "activation")
        else:
            gate = self.linear(x, wide_bytes, "MLP gate", bias=dims.mlp_bias)
            active = self.unary(gate, "activation")
            up = self.linear(x, wide_bytes, "MLP up", bias=dims.mlp_bias)
        tape.drop(gate)
        product = tape.op(
            "MLP product",
            wide_bytes,
            [Gradient(active, wide_bytes), Gradient(up, wide_bytes)],
            saves=[active, up],
        )
        tape.drop(active, up)
        down = self.linear(
            product, self.hidden_bytes, "MLP down", bias=dims.mlp_bias, out_bytes=output_bytes
        )
        tape.drop(product)
        return down

    def plain_mlp(self, x: Value) -> Value:
        """down(act(up(x))), then dropout."""
        bias = self.dims.mlp_bias
        wide = self.linear(x, self.wide_bytes, "MLP up", bias=bias)
        if self.dims.family is Family.GPT2:
            active = self.gelu_by_parts(wide)
        else:
            active = self.unary(wide, "activation", keeps_output=self.dims.family is Family.OPT)
        self.tape.drop(wide)
        out = self.linear(active, self.hidden_bytes, "MLP down", bias=bias)
        self.tape.drop(active)
        return self.dropout(out)
