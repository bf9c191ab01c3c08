"""The packed engine: the tokens of all texts concatenated, without padding or masks.

For decoders of the Llama architecture (`packed_weights.unsupported_reason`). Matrix products run over all
tokens at once; attention runs text by text, with texts of equal length in one call, so no mask is needed.
The last layer computes only what the heads read: the state of each text's last token.

Legend: N texts, T packed tokens of all texts, L tokens of each text in a group, H hidden size,
A query heads, K key and value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from services.api.serving.engines.fused_ops import FusedOps
from services.api.serving.engines.packed_weights import Backbone, BackboneShape, Heads, Layer
from services.api.serving.engines.throttle import yield_to_requests
from services.api.serving.engines.torch_threads import use_threads
from services.api.serving.prediction import FloatArray
from services.shared.model.segments import unmark_types


class PackedEngine:
    """Runs a backbone and its heads over packed texts."""

    def __init__(
        self,
        backbone: Backbone,
        heads: Heads,
        *,
        ops: FusedOps | None = None,
        kind: str | None = None,
    ) -> None:
        self._backbone: Backbone | None = backbone
        self._heads: Heads = heads
        self._ops = ops or FusedOps()
        dtype = str(backbone.dtype).removeprefix("torch.")
        self.kind = kind or f"packed-{dtype}"

    def run(self, texts: Sequence[Sequence[int]], *, threads: int = 1) -> dict[str, FloatArray]:
        """Return the logits [N, C] of each head for N non-empty token lists."""
        use_threads(threads)
        batch = pack(texts)
        with torch.inference_mode():
            states = forward(self.backbone, batch, self._ops)  # [N, H]
            return {
                name: _unpack(F.linear(states, weight, bias), batch.order)
                for name, (weight, bias) in self._heads.items()
            }

    @property
    def backbone(self) -> Backbone:
        """Return the weights. The engine must not be closed."""
        assert self._backbone is not None, "the engine is closed"
        return self._backbone

    @property
    def runs_on_cpu(self) -> bool:
        """Return whether the weights are in host memory."""
        return self.backbone.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the states and of the heads' weights."""
        return self.backbone.dtype

    def shares_weights_with(self, other: PackedEngine) -> bool:
        """Return whether both engines run the same backbone."""
        return self._backbone is not None and self._backbone is other._backbone

    def with_heads(self, heads: Heads) -> PackedEngine:
        """Return an engine with other heads on the same backbone; either may be closed first."""
        return PackedEngine(self.backbone, heads, ops=self._ops, kind=self.kind)

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Return how many tokens a batch of texts of these lengths computes: there is no padding."""
        return sum(lengths)

    def close(self) -> None:
        """Release the weights."""
        self._backbone = None
        self._heads = {}


class LengthGroup(NamedTuple):
    """Adjacent texts of equal length."""

    start: int  # position of the first token
    num_texts: int
    length: int  # tokens per text


@dataclass(frozen=True)
class PackedBatch:
    """N texts concatenated to T tokens, sorted by length so that equal lengths are adjacent."""

    order: list[int]  # packed position -> index of the text
    groups: list[LengthGroup]
    tokens: NDArray[np.int64]  # [T]
    positions: NDArray[np.int64]  # [T]
    last: NDArray[np.int64]  # [N], the position of each text's last token


def pack(texts: Sequence[Sequence[int]]) -> PackedBatch:
    """Concatenate texts, shortest first."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    lengths = np.array([len(texts[index]) for index in order])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    groups = []
    first = 0
    for index in range(1, len(order) + 1):
        if index == len(order) or lengths[index] != lengths[first]:
            groups.append(LengthGroup(int(starts[first]), index - first, int(lengths[first])))
            first = index
    return PackedBatch(
        order=order,
        groups=groups,
        # Decoders have no token types.
        tokens=unmark_types(np.concatenate([np.asarray(texts[i], np.int64) for i in order]))[0],
        positions=np.arange(ends[-1]) - np.repeat(starts, lengths),
        last=ends - 1,
    )


def forward(backbone: Backbone, batch: PackedBatch, ops: FusedOps) -> Tensor:
    """Return the state [N, H] of each text's last token after the final norm, in packed order."""
    shape, device = backbone.shape, backbone.device
    tokens, positions, last = (
        torch.from_numpy(each).to(device) for each in (batch.tokens, batch.positions, batch.last)
    )
    cos, sin = backbone.cos[positions].unsqueeze(1), backbone.sin[positions].unsqueeze(1)
    state = F.embedding(tokens, backbone.embedding).to(backbone.dtype)  # [T, H]
    x = ops.rms_norm(state, backbone.layers[0].attention_norm, shape.eps)
    for number, layer in enumerate(backbone.layers):
        yield_to_requests()  # only while a student is checked in the background
        if layer.query is None:
            attended = _attend(layer, shape, x, cos, sin, batch.groups, ops)
        else:
            attended = _attend_last(layer, shape, x, cos, sin, last, batch.groups, ops)
            state = state[last]
        state, x = ops.add_rms_norm(state, layer.output(attended), layer.mlp_norm, shape.eps)
        update = layer.down(ops.swiglu(layer.gate_up(x)))
        following = backbone.layers[number + 1 : number + 2]
        weight = following[0].attention_norm if following else backbone.final_norm
        state, x = ops.add_rms_norm(state, update, weight, shape.eps)
    return x


def _attend(
    layer: Layer,
    shape: BackboneShape,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    groups: list[LengthGroup],
    ops: FusedOps,
) -> Tensor:
    """Compute the attention of every token within its text: [T, H] -> [T, A * D]."""
    num_qk_heads = shape.num_heads + shape.num_kv_heads
    qkv = layer.query_key_value(x).view(x.shape[0], -1, shape.head_dim)
    qk = _apply_rope(qkv[:, :num_qk_heads], layer.query_key_norm, shape, cos, sin, ops)
    q, k, v = qk[:, : shape.num_heads], qk[:, shape.num_heads :], qkv[:, num_qk_heads:]
    parts = []
    for start, count, length in groups:
        rows = slice(start, start + count * length)
        attended = causal_attention(*(_by_text(each[rows], count) for each in (q, k, v)))
        parts.append(attended.reshape(count * length, -1))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _attend_last(
    layer: Layer,
    shape: BackboneShape,
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    last: Tensor,
    groups: list[LengthGroup],
    ops: FusedOps,
) -> Tensor:
    """Compute the attention of the last token of each text: [T, H] -> [N, A * D]."""
    assert layer.query is not None
    kv = layer.query_key_value(x).view(x.shape[0], -1, shape.head_dim)
    q = layer.query(x[last]).view(last.shape[0], -1, shape.head_dim)
    weights = layer.query_key_norm
    q_weight, k_weight = (
        (None, None)
        if weights is None
        else (weights[: shape.num_heads], weights[shape.num_heads :])
    )
    q = _apply_rope(q, q_weight, shape, cos[last], sin[last], ops)
    k = _apply_rope(kv[:, : shape.num_kv_heads], k_weight, shape, cos, sin, ops)
    v = kv[:, shape.num_kv_heads :]
    parts = []
    text = 0
    for start, count, length in groups:
        rows = slice(start, start + count * length)
        attended = last_token_attention(
            q[text : text + count], _by_text(k[rows], count), _by_text(v[rows], count)
        )
        parts.append(attended.reshape(count, -1))
        text += count
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention: q [N, L, A, D], k and v [N, L, K, D] -> the shape of q.

    Uses torch's kernel, so that results equal those of transformers to the last bit. Three bfloat16
    products take half its time for short texts and are as close to float32, but change the decision
    for one text in fifty of a random student.
    """
    return F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=q.shape[1] > 1,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def last_token_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the last token's attention: q [N, A, D], k and v [N, L, K, D] -> the shape of q."""
    return F.scaled_dot_product_attention(
        q.unsqueeze(2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        enable_gqa=q.shape[1] != k.shape[2],
    ).squeeze(2)


def _apply_rope(
    heads: Tensor,
    weight: Tensor | None,
    shape: BackboneShape,
    cos: Tensor,
    sin: Tensor,
    ops: FusedOps,
) -> Tensor:
    if weight is None:
        return ops.apply_rope(heads, cos, sin)
    return ops.rms_norm_rope(heads, weight, cos, sin, shape.eps)


def _by_text(rows: Tensor, count: int) -> Tensor:
    """Return [count * L, heads, D] as [count, L, heads, D]."""
    return rows.view(count, -1, *rows.shape[1:])


def _unpack(packed: Tensor, order: list[int]) -> FloatArray:
    values: FloatArray = packed.float().cpu().numpy()
    logits = np.empty_like(values)
    logits[order] = values
    return logits
