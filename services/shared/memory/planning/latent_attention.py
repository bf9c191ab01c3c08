"""Multi-head latent attention (DeepSeek V2 and V3): queries, keys and values from low-rank projections.

Taken from dry runs of transformers 5.24: keys and values are expanded for every head in training, so attention
itself runs over as many heads as there are queries, with values narrower than keys.
"""

from __future__ import annotations

from services.shared.memory.architecture.dimensions import Family, Latent
from services.shared.memory.planning.allocation_tape import Gradient, Value
from services.shared.memory.planning.attention import attend
from services.shared.memory.planning.operations import Operations


class LatentAttention(Operations):
    """The operations of a layer with latent attention."""

    def latent_attention(self, normed: Value) -> Value:
        """Project, rotate a part of each head, expand keys and values, attend, project back."""
        tape, latent, width = self.tape, self._latent, self.count * self.value_bytes
        rotated_bytes = width * self.dims.num_heads * latent.rope_dim
        queries = self._queries(normed)
        # A view of another layout: its gradient is copied back.
        heads_first = tape.op("queries", 0, [Gradient(queries, queries.size_bytes)])
        query_rest, query_rotary = tape.split(
            "queries", heads_first, (queries.size_bytes - rotated_bytes, rotated_bytes)
        )
        compressed = self.linear(
            normed, width * (latent.key_value_rank + latent.rope_dim), "compressed keys and values"
        )
        latent_view, key_rotary = tape.split(
            "compressed keys and values",
            compressed,
            (width * latent.key_value_rank, width * latent.rope_dim),
        )
        latents = self.rms_norm(latent_view, latent.key_value_rank, 1, "latent norm")
        turned_query, turned_key = self._rotate(query_rotary, key_rotary)
        query = tape.op(
            "queries",
            queries.size_bytes,
            [Gradient(query_rest, alias=True), Gradient(turned_query, alias=True)],
        )
        expanded, key, value = self._expand(latents, turned_key)
        context = attend(tape, self.heads, self.kernel, (query, key, value))
        out = self.linear(
            context, self.hidden_bytes, "attention output", bias=self.dims.output_bias
        )
        tape.drop(context, queries, heads_first, query_rest, query_rotary, turned_query)
        tape.drop(compressed, latent_view, key_rotary, latents, turned_key)
        tape.drop(query, key, value, expanded)
        return out

    @property
    def _latent(self) -> Latent:
        assert self.dims.latent is not None
        return self.dims.latent

    def _queries(self, normed: Value) -> Value:
        rank, width = self._latent.query_rank, self.count * self.value_bytes
        if rank is None:
            return self.linear(normed, self.heads.query_bytes, "queries")
        low = self.linear(normed, width * rank, "compressed queries", bias=self.dims.attention_bias)
        scaled = self.rms_norm(low, rank, 1, "query norm")
        self.tape.drop(low)
        queries = self.linear(scaled, self.heads.query_bytes, "queries")
        self.tape.drop(scaled)
        return queries

    def _rotate(self, query: Value, key: Value) -> tuple[Value, Value]:
        if self.dims.family is Family.DEEPSEEK_V2:
            return self._rotate_complex(query, key)
        return self.rotate_pairs(query), self.rotate_pairs(key)

    def _rotate_complex(self, *inputs: Value) -> tuple[Value, Value]:
        """A product of complex numbers in float32, of queries and keys together."""
        tape, ratio = self.tape, 4 // self.value_bytes
        upcast = [self.upcast(x, ratio * x.size_bytes, "rotary") for x in inputs]
        results = []
        for x, wide in zip(inputs, upcast, strict=True):
            product = tape.op("rotary", wide.size_bytes, [Gradient(wide, wide.size_bytes)])
            results.append(self.downcast(product, x.size_bytes, "rotary"))
            tape.drop(product)
        tape.drop(*upcast)
        query, key = results
        return query, key

    def _expand(self, latents: Value, turned_key: Value) -> tuple[Value, Value, Value]:
        """Return the projected keys and values, the whole keys, and the values, a view of the first."""
        tape, latent, heads = self.tape, self._latent, self.heads
        width = self.count * self.value_bytes * self.dims.num_heads
        nope, rope = width * latent.nope_dim, width * latent.rope_dim
        projected = self.linear(latents, nope + heads.context_bytes, "keys and values")
        heads_first = tape.op("keys and values", 0, [Gradient(projected, projected.size_bytes)])
        key_rest, value = tape.split("keys and values", heads_first, (nope, heads.context_bytes))
        # Two assignments to slices of an empty tensor; each one's backward copies the whole gradient.
        key = tape.op(
            "keys",
            heads.key_bytes,
            [
                Gradient(key_rest, nope, (heads.key_bytes, rope)),
                Gradient(turned_key, turned_key.size_bytes, (rope,)),
            ],
        )
        tape.drop(key_rest, heads_first)
        return projected, key, value
