"""The forward pass of a packed encoder: BERT, RoBERTa, XLM-R or ModernBERT.

As for decoders, matrix products run over all tokens at once and attention runs over texts of equal length.
Where the heads read the first token, the last layer computes no other.

Legend: N texts, T packed tokens of all texts, R rows (T, or N in such a last layer), L tokens of each text in
a group, H hidden size, A heads, D head width.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from services.api.serving.engines.encoder_weights import (
    EncoderBackbone,
    EncoderLayer,
    EncoderShape,
    Norm,
    Rope,
)
from services.api.serving.engines.fused_ops import apply_rope
from services.api.serving.engines.linear import activate
from services.api.serving.engines.packed_batch import PackedBatch
from services.api.serving.engines.packed_decoder import by_text
from services.api.serving.engines.throttle import yield_to_requests
from services.shared.memory.architecture.pooling import Pooling


def encode(backbone: EncoderBackbone, batch: PackedBatch) -> Tensor:
    """Return the pooled state [N, H] of each text, in packed order."""
    shape = backbone.shape
    state = _embed(backbone, batch)
    first = torch.from_numpy(batch.first).to(state.device)
    positions = torch.from_numpy(batch.positions).to(state.device)
    ropes = {
        is_local: Rope(rope.cos[positions].unsqueeze(1), rope.sin[positions].unsqueeze(1))
        for is_local, rope in backbone.ropes.items()
    }
    run = _post_norm_layer if shape.post_norm else _pre_norm_layer
    for layer in backbone.layers:
        yield_to_requests()  # only while a student is checked in the background
        state = run(layer, shape, state, first, batch, ropes.get(layer.is_local))
    if backbone.final_norm is not None:
        state = _layer_norm(state, backbone.final_norm, shape)
    if shape.pooling is Pooling.FIRST:
        return state  # of the first tokens alone, by the last layer
    means = [
        by_text(state[start : start + count * length], count).mean(dim=1, dtype=torch.float32)
        for start, count, length in batch.groups
    ]
    return torch.cat(means).to(state.dtype)


def _embed(backbone: EncoderBackbone, batch: PackedBatch) -> Tensor:
    """Return the embedding of every token: [T, H]."""
    device, dtype = backbone.device, backbone.dtype
    state = F.embedding(torch.from_numpy(batch.tokens).to(device), backbone.words).to(dtype)
    if backbone.types is not None:
        state = state + _type_embedding(backbone.types, batch.types)
    if backbone.positions is not None:
        numbers = _position_numbers(batch, backbone.shape.padding_id)
        state = state + F.embedding(torch.from_numpy(numbers).to(device), backbone.positions)
    return _layer_norm(state, backbone.embedding_norm, backbone.shape)


def _type_embedding(table: Tensor, types: NDArray[np.int64] | None) -> Tensor:
    """Return the embedding of token types; a model of one type ignores them, as in training."""
    if types is None or len(table) == 1:
        return table[:1]
    return F.embedding(torch.from_numpy(types).to(table.device), table)


def _position_numbers(batch: PackedBatch, padding_id: int | None) -> NDArray[np.int64]:
    """Return the row of each token [T] in the position embedding."""
    if padding_id is None:
        return batch.positions
    real = batch.tokens != padding_id
    if real.all():
        return batch.positions + (padding_id + 1)
    # RoBERTa gives a padding token that a text itself contains no number of its own.
    count = np.cumsum(real)
    before = np.repeat((count - real)[batch.first], batch.last - batch.first + 1)
    return np.where(real, count - before, 0) + padding_id


def _post_norm_layer(
    layer: EncoderLayer,
    shape: EncoderShape,
    state: Tensor,
    first: Tensor,
    batch: PackedBatch,
    rope: Rope | None,
) -> Tensor:
    """BERT's layer: [T, H] -> [R, H]."""
    attended = _attend(layer, shape, state, first, batch, rope)
    if layer.query is not None:
        state = state[first]
    assert layer.attention_norm is not None
    state = _layer_norm(state + layer.output(attended), layer.attention_norm, shape)
    return _layer_norm(state + layer.down(layer.up(state)), layer.mlp_norm, shape)


def _pre_norm_layer(
    layer: EncoderLayer,
    shape: EncoderShape,
    state: Tensor,
    first: Tensor,
    batch: PackedBatch,
    rope: Rope | None,
) -> Tensor:
    """ModernBERT's layer: [T, H] -> [R, H]."""
    norm = layer.attention_norm
    normed = state if norm is None else _layer_norm(state, norm, shape)
    attended = _attend(layer, shape, normed, first, batch, rope)
    if layer.query is not None:
        state = state[first]
    state = state + layer.output(attended)
    given, gate = layer.up(_layer_norm(state, layer.mlp_norm, shape)).chunk(2, dim=-1)
    return state + layer.down(activate(given, shape.activation) * gate)


def _attend(
    layer: EncoderLayer,
    shape: EncoderShape,
    x: Tensor,
    first: Tensor,
    batch: PackedBatch,
    rope: Rope | None,
) -> Tensor:
    """Compute the attention of every token, or of each text's first token, within its text: [T, H] -> [R, H]."""
    heads, width = shape.num_heads, shape.head_dim
    qkv = layer.query_key_value(x).view(x.shape[0], -1, width)  # [T, 2 A or 3 A, D]
    k, v = qkv[:, -2 * heads : -heads], qkv[:, -heads:]
    q = qkv[:, :heads]
    if layer.query is not None:
        q = layer.query(x[first]).view(-1, heads, width)
    if rope is not None:
        own = rope if layer.query is None else Rope(rope.cos[first], rope.sin[first])
        # ModernBERT rotates in float32.
        k = apply_rope(k.float(), rope.cos, rope.sin).to(x.dtype)
        q = apply_rope(q.float(), own.cos, own.sin).to(x.dtype)
    parts, text = [], 0
    for start, count, length in batch.groups:
        rows = slice(start, start + count * length)
        own_rows = rows if layer.query is None else slice(text, text + count)
        mask = _window_mask(length, shape.window, x.device) if layer.is_local else None
        if mask is not None and layer.query is not None:
            mask = mask[:1]
        attended = F.scaled_dot_product_attention(
            by_text(q[own_rows], count).transpose(1, 2),
            by_text(k[rows], count).transpose(1, 2),
            by_text(v[rows], count).transpose(1, 2),
            attn_mask=mask,
        )
        parts.append(attended.transpose(1, 2).reshape(own_rows.stop - own_rows.start, -1))
        text += count
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def _window_mask(length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Return which tokens [L, L] a local layer sees, None where it sees all of so short a text."""
    if window is None or length <= window + 1:
        return None
    places = torch.arange(length, device=device)
    return (places[:, None] - places).abs() <= window


def _layer_norm(x: Tensor, norm: Norm, shape: EncoderShape) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), norm.weight, norm.bias, shape.eps)
