"""The forward pass of a packed decoder of the Llama architecture.

Matrix products run over all tokens at once; attention runs text by text, with texts of equal length in one
call, so no mask is needed. The last layer computes only what the heads read: the state of each text's last
token.

Legend: N texts, T packed tokens of all texts, L tokens of each text in a group, H hidden size,
A query heads, K key and value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from services.api.serving.engines.fused_ops import FusedOps
from services.api.serving.engines.packed_batch import LengthGroup, PackedBatch
from services.api.serving.engines.packed_weights import Backbone, BackboneShape, Layer
from services.api.serving.engines.throttle import yield_to_requests


def decode(backbone: Backbone, batch: PackedBatch, ops: FusedOps) -> Tensor:
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
        attended = causal_attention(*(by_text(each[rows], count) for each in (q, k, v)))
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
            q[text : text + count], by_text(k[rows], count), by_text(v[rows], count)
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


def by_text(rows: Tensor, count: int) -> Tensor:
    """Return [count * L, heads, D] as [count, L, heads, D]."""
    return rows.view(count, -1, *rows.shape[1:])
