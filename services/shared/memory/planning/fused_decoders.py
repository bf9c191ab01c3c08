"""Falcon and BLOOM: decoders of LayerNorms around one projection for queries, keys and values.

Taken from dry runs of transformers 5.24, whose code for both is older than its common attention functions.
"""

from __future__ import annotations

from services.shared.memory.planning.allocation_tape import Gradient, Value
from services.shared.memory.planning.attention import attend
from services.shared.memory.planning.operations import Operations


class FusedDecoders(Operations):
    """The layers of Falcon and BLOOM as the sequence of their operations."""

    def falcon(self, x: Value) -> Value:
        """Attention and MLP in parallel, on one norm of the input or on one each."""
        tape = self.tape
        for_attention = self.layer_norm(x, "input norm")
        two_norms = self.dims.parallel_norms == 2
        for_mlp = self.layer_norm(x, "MLP norm") if two_norms else for_attention
        attended = self._falcon_attention(for_attention)
        wide = self.linear(for_mlp, self.wide_bytes, "MLP up", bias=self.dims.mlp_bias)
        active = self.unary(wide, "GELU")
        tape.drop(wide)
        mlp = self.linear(active, self.hidden_bytes, "MLP down", bias=self.dims.mlp_bias)
        tape.drop(active)
        # Added in place.
        summed = tape.op("residual", 0, [Gradient(mlp, alias=True), Gradient(attended, alias=True)])
        out = self.add(x, summed, self.output_bytes)
        tape.drop(summed, mlp, attended, for_attention, *([for_mlp] if two_norms else []))
        return out

    def bloom(self, x: Value) -> Value:
        """Attention with ALiBi, and an MLP without a gate, each after a norm."""
        tape = self.tape
        normed = self.layer_norm(x, "input norm")
        attended = self._bloom_attention(normed)
        tape.drop(normed)
        middle = self.add(x, attended, self.hidden_bytes)
        tape.drop(attended)
        normed = self.layer_norm(middle, "MLP norm")
        wide = self.linear(normed, self.wide_bytes, "MLP up", bias=True)
        # A function of its own, which keeps only its input and computes forward again in backward.
        size = wide.size_bytes
        active = tape.op(
            "GELU", size, [Gradient(wide, size, (size,) * 4)], saves=[wide], extra_bytes=(size,) * 3
        )
        tape.drop(wide)
        mlp = self.linear(active, self.hidden_bytes, "MLP down", bias=True)
        tape.drop(active)
        out = self.add(middle, mlp, self.output_bytes)
        tape.drop(mlp, middle, normed)
        return out

    def _falcon_attention(self, normed: Value) -> Value:
        tape, heads = self.tape, self.heads
        total = heads.query_bytes + 2 * heads.key_bytes
        fused = self.linear(normed, total, "query, key and value", bias=self.dims.attention_bias)
        # Queries are a slice; keys and values, selected by a list of indices, are copies.
        query = tape.op("query", 0, [Gradient(fused, total)])
        key, value = (
            tape.op("key and value", heads.key_bytes, [Gradient(fused, total, (total,))])
            for _ in range(2)
        )
        if heads.num_kv_heads > 1:
            repeated = [
                tape.op("query, key and value", heads.query_bytes, [Gradient(part, size)])
                for part, size in (
                    (query, heads.query_bytes),
                    (key, heads.key_bytes),
                    (value, heads.key_bytes),
                )
            ]
            tape.drop(query, key, value)
            query, key, value = repeated
        rotated = self.apply_rope_of(query, heads.query_bytes), self.apply_rope(key)
        tape.drop(query, key)
        context = attend(tape, heads, self.kernel, (*rotated, value))
        out = self.linear(
            context, self.hidden_bytes, "attention output", bias=self.dims.output_bias
        )
        tape.drop(context, *rotated, value, fused)
        return out

    def _bloom_attention(self, normed: Value) -> Value:
        tape, heads = self.tape, self.heads
        low, high = heads.scores * heads.value_bytes, heads.scores * 4
        fused = self.linear(normed, 3 * heads.query_bytes, "query, key and value", bias=True)
        views = tape.split("query, key and value", fused, [heads.query_bytes] * 3)
        query, key, value = (
            tape.op("query, key and value", heads.query_bytes, [Gradient(view, alias=True)])
            for view in views
        )
        both = [Gradient(query, heads.query_bytes), Gradient(key, heads.query_bytes)]
        scores = tape.op("attention scores", low, both, saves=[query, key])
        masked = tape.op("masked attention scores", low, [Gradient(scores, alias=True)])
        upcast = tape.op("attention scores in float32", high, [Gradient(masked, low)])
        weights = tape.op("attention softmax", high, [Gradient(upcast, high)], saves_out=True)
        tape.drop(upcast)
        lowered = tape.op("attention weights", low, [Gradient(weights, high)])
        tape.drop(weights)
        context = tape.op(
            "attention context",
            heads.query_bytes,
            [Gradient(lowered, low), Gradient(value, heads.query_bytes)],
            saves=[lowered, value],
        )
        merged = tape.op(
            "attention context", heads.query_bytes, [Gradient(context, heads.query_bytes)]
        )
        tape.drop(context)
        out = self.linear(merged, self.hidden_bytes, "attention output", bias=True)
        tape.drop(merged, masked, scores, query, key, value, *views, fused)
        tape.hold(lowered)  # returned beside the output
        return out
