"""The packed engine: tokens of all texts in one row, no padding, no mask.

For decoders of the Llama shape (`layout.why_not`): causal attention reads only what lies before,
so texts packed one after another need no mask as long as attention runs text by text; texts of the
same length run together. The last layer computes only what the heads read: the last token's state.

Legend: N texts, T packed tokens of all texts, L tokens of each text in a run, H hidden size,
A query heads, K key and value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from services.api.serving.engines.fused_ops import Pieces
from services.api.serving.engines.packed_weights import Backbone, Heads, Layer, Shape
from services.api.serving.engines.throttle import rest
from services.api.serving.engines.torch_threads import use_threads
from services.api.serving.prediction import FloatArray


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let each token attend to itself and those before: q [N, L, A, D], k and v [N, L, K, D] -> q's shape.

    torch's own kernel, so that answers are those of the plain forward to the last bit. Three products
    in bfloat16 take half its time for short texts and are as near to float32, but decide one text in
    fifty of a random student otherwise.
    """
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=q.shape[1] > 1,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def from_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Let the last token of each text attend to the whole: q [N, A, D], k and v [N, L, K, D] -> q's shape."""
    return F.scaled_dot_product_attention(
        q.unsqueeze(2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        enable_gqa=q.shape[1] != k.shape[2],
    ).squeeze(2)


@dataclass(frozen=True)
class Packing:
    """How N texts lie in one row of T tokens: sorted by length, so that equal lengths are neighbours."""

    order: list[int]  # position in the row -> text
    runs: list[tuple[int, int, int]]  # (first token, texts, tokens a text)
    tokens: FloatArray  # int64 [T]
    positions: FloatArray  # int64 [T]
    last: FloatArray  # int64 [N], where each text's last token lies


class PackedEngine:
    """Runs packed texts through a backbone and its heads."""

    def __init__(
        self,
        backbone: Backbone,
        heads: Heads,
        *,
        pieces: Pieces | None = None,
        kind: str | None = None,
    ) -> None:
        self._backbone: Backbone | None = backbone
        self._heads: Heads = heads
        self._pieces = pieces or Pieces()
        dtype = str(backbone.dtype).removeprefix("torch.")
        self.kind = kind or f"packed-{dtype}"

    def run(self, texts: Sequence[Sequence[int]], *, threads: int = 1) -> dict[str, FloatArray]:
        """Return the logits [N, C] of each head for N token lists, none of them empty."""
        assert self._backbone is not None, "the engine is closed"
        use_threads(threads)
        packing = pack(texts)
        with torch.inference_mode():
            states = forward(self._backbone, packing, self._pieces)  # [N, H]
            return {
                name: _unpack(F.linear(states, weight, bias), packing.order)
                for name, (weight, bias) in self._heads.items()
            }

    @property
    def on_processor(self) -> bool:
        """Say whether the weights lie in the machine's memory."""
        assert self._backbone is not None, "the engine is closed"
        return self._backbone.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the heads' weights."""
        assert self._backbone is not None, "the engine is closed"
        return self._backbone.dtype

    def shares_weights_with(self, other: PackedEngine) -> bool:
        """Say whether both engines run the same backbone."""
        return self._backbone is not None and self._backbone is other._backbone

    def with_heads(self, heads: Heads) -> PackedEngine:
        """Return an engine with other heads over the same weights; either may be closed first."""
        assert self._backbone is not None, "the engine is closed"
        return PackedEngine(self._backbone, heads, pieces=self._pieces, kind=self.kind)

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Return how many tokens a batch of such texts costs: their own and no others."""
        return sum(lengths)

    def close(self) -> None:
        """Let go of the weights."""
        self._backbone = None
        self._heads = {}


def pack(texts: Sequence[Sequence[int]]) -> Packing:
    """Lay texts in one row, the shortest first."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    lengths = np.array([len(texts[index]) for index in order])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    runs = []
    first = 0
    for index in range(1, len(order) + 1):
        if index == len(order) or lengths[index] != lengths[first]:
            runs.append((int(starts[first]), index - first, int(lengths[first])))
            first = index
    return Packing(
        order=order,
        runs=runs,
        tokens=np.concatenate([np.asarray(texts[index], np.int64) for index in order]),
        positions=np.arange(ends[-1]) - np.repeat(starts, lengths),
        last=ends - 1,
    )


def forward(backbone: Backbone, packing: Packing, pieces: Pieces) -> Tensor:
    """Return the state [N, H] of each text's last token after the final norm, in packed order."""
    shape, device = backbone.shape, backbone.device
    tokens, positions, last = (
        torch.from_numpy(each).to(device)
        for each in (packing.tokens, packing.positions, packing.last)
    )
    cos, sin = backbone.cos[positions].unsqueeze(1), backbone.sin[positions].unsqueeze(1)
    state = F.embedding(tokens, backbone.embedding).to(backbone.dtype)  # [T, H]
    x = pieces.norm(state, backbone.layers[0].attention_norm, shape.eps)
    for number, layer in enumerate(backbone.layers):
        rest()  # where a student is tried aside
        if layer.query is None:
            mixed = _attend(layer, shape, x, cos, sin, packing.runs, pieces)
        else:
            mixed = _attend_last(layer, shape, x, cos, sin, last, packing.runs, pieces)
            state = state[last]
        state, x = pieces.add_norm(state, layer.output(mixed), layer.mlp_norm, shape.eps)
        update = layer.down(pieces.gate(layer.gate_up(x)))
        following = backbone.layers[number + 1 : number + 2]
        weight = following[0].attention_norm if following else backbone.final_norm
        state, x = pieces.add_norm(state, update, weight, shape.eps)
    return x


def _attend(
    layer: Layer,
    shape: Shape,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    runs: list[tuple[int, int, int]],
    pieces: Pieces,
) -> Tensor:
    """Let every token attend to those before it in its text: [T, H] -> [T, A * D]."""
    rotated = shape.num_heads + shape.num_kv_heads
    qkv = layer.query_key_value(x).view(x.shape[0], -1, shape.head_dim)
    qk = _turn(qkv[:, :rotated], layer.query_key_norm, shape, cos, sin, pieces)
    q, k, v = qk[:, : shape.num_heads], qk[:, shape.num_heads :], qkv[:, rotated:]
    parts = []
    for start, count, length in runs:
        rows = slice(start, start + count * length)
        mixed = causal(*(_by_text(each[rows], count) for each in (q, k, v)))
        parts.append(mixed.reshape(count * length, -1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _attend_last(
    layer: Layer,
    shape: Shape,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    last: Tensor,
    runs: list[tuple[int, int, int]],
    pieces: Pieces,
) -> Tensor:
    """Let the last token of each text attend to the whole text: [T, H] -> [N, A * D]."""
    assert layer.query is not None
    kv = layer.query_key_value(x).view(x.shape[0], -1, shape.head_dim)
    q = layer.query(x[last]).view(last.shape[0], -1, shape.head_dim)
    weights = layer.query_key_norm
    q_weight, k_weight = (
        (None, None)
        if weights is None
        else (weights[: shape.num_heads], weights[shape.num_heads :])
    )
    q = _turn(q, q_weight, shape, cos[last], sin[last], pieces)
    k = _turn(kv[:, : shape.num_kv_heads], k_weight, shape, cos, sin, pieces)
    v = kv[:, shape.num_kv_heads :]
    parts = []
    text = 0
    for start, count, length in runs:
        rows = slice(start, start + count * length)
        mixed = from_last(
            q[text : text + count], _by_text(k[rows], count), _by_text(v[rows], count)
        )
        parts.append(mixed.reshape(count, -1))
        text += count
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _turn(
    heads: Tensor,
    weight: Tensor | None,
    shape: Shape,
    cos: Tensor,
    sin: Tensor,
    pieces: Pieces,
) -> Tensor:
    if weight is None:
        return pieces.rotate(heads, cos, sin)
    return pieces.norm_rotate(heads, weight, cos, sin, shape.eps)


def _by_text(rows: Tensor, count: int) -> Tensor:
    """Return [count * L, heads, D] as [count, L, heads, D]."""
    return rows.view(count, -1, *rows.shape[1:])


def _unpack(packed: Tensor, order: list[int]) -> FloatArray:
    values: FloatArray = packed.float().cpu().numpy()
    logits = np.empty_like(values)
    logits[order] = values
    return logits
