"""The packed engine: tokens of all texts in one row, no padding, no mask.

For decoders of the Llama shape (Qwen3, Qwen2, Llama): causal attention reads only what lies before,
so texts packed one after another need no mask as long as attention runs text by text; texts of the
same length run together. The last layer computes only what the heads read: the last token's state.

Legend: N texts, T packed tokens of all texts, L tokens of each text in a run, H hidden size,
A query heads, K key and value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from services.api.serving.linears import Linear, make_linear
from services.api.serving.pieces import Pieces, compiled_pieces
from services.api.serving.prediction import FloatArray
from services.api.serving.threads import use_threads
from services.shared.model.classifier import Classifier, Pooling, transformer_layers

FAMILIES = frozenset({"qwen3", "qwen2", "llama"})

# Rotary frequencies that do not depend on how long the text is.
_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})


@dataclass(frozen=True)
class Shape:
    """What the forward needs to know of the configuration."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True)
class Layer:
    """One block; `query_key_norm` is [A + K, D], None where the family has no such norm."""

    attention_norm: Tensor
    query_key_norm: Tensor | None
    query: Linear | None  # the last layer only: its queries are needed for the last tokens alone
    query_key_value: Linear  # the last layer: keys and values
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Backbone:
    """All weights, shared by engines that differ in their heads alone."""

    shape: Shape
    embedding: Tensor  # [vocabulary, H]
    layers: list[Layer]
    final_norm: Tensor
    cos: Tensor  # [positions, D]
    sin: Tensor


@dataclass(frozen=True)
class Packing:
    """How N texts lie in one row of T tokens: sorted by length, so that equal lengths are neighbours."""

    order: list[int]  # position in the row -> text
    runs: list[tuple[int, int, int]]  # (first token, texts, tokens a text)
    tokens: FloatArray  # int64 [T]
    positions: FloatArray  # int64 [T]
    last: FloatArray  # int64 [N], where each text's last token lies


def why_not(config: Any, *, max_length: int) -> str | None:
    """Say why a configuration is none that this engine computes; None where it is."""
    if config.model_type not in FAMILIES:
        return f"{config.model_type} is not one of {', '.join(sorted(FAMILIES))}"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act}"
    rotation = (config.rope_parameters or {}).get("rope_type", "default")
    if rotation not in _FIXED_ROTATIONS:
        return f"rope_type is {rotation}"
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if kinds != {"full_attention"} and (window is None or window < max_length):
        return f"attention is {', '.join(sorted(kinds))}"
    return None


class PackedEngine:
    """Runs packed texts through a backbone and its heads."""

    def __init__(
        self,
        backbone: Backbone,
        heads: dict[str, tuple[Tensor, Tensor]],  # (weight [C, H], bias [C]) by head
        *,
        threads: int,
        pieces: Pieces | None = None,
        kind: str | None = None,
    ) -> None:
        self._backbone: Backbone | None = backbone
        self._heads = heads
        self._threads = threads
        self._pieces = pieces or Pieces()
        dtype = str(backbone.embedding.dtype).removeprefix("torch.")
        self.kind = kind or f"packed-{dtype}"

    def run(self, texts: Sequence[Sequence[int]]) -> dict[str, FloatArray]:
        """Return the logits [N, C] of each head for N token lists, none of them empty."""
        assert self._backbone is not None, "the engine is closed"
        use_threads(self._threads)
        packing = pack(texts)
        with torch.inference_mode():
            states = forward(self._backbone, packing, self._pieces)  # [N, H]
            return {
                name: _unpack(F.linear(states, weight, bias), packing.order)
                for name, (weight, bias) in self._heads.items()
            }

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
    shape, device = backbone.shape, backbone.embedding.device
    tokens, positions, last = (
        torch.from_numpy(each).to(device)
        for each in (packing.tokens, packing.positions, packing.last)
    )
    cos, sin = backbone.cos[positions].unsqueeze(1), backbone.sin[positions].unsqueeze(1)
    state = F.embedding(tokens, backbone.embedding)  # [T, H]
    x = pieces.norm(state, backbone.layers[0].attention_norm, shape.eps)
    for number, layer in enumerate(backbone.layers):
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
        mixed = F.scaled_dot_product_attention(
            _by_text(q[rows], count),
            _by_text(k[rows], count),
            _by_text(v[rows], count),
            is_causal=length > 1,
            enable_gqa=shape.num_heads != shape.num_kv_heads,
        )
        parts.append(mixed.transpose(1, 2).reshape(count * length, -1))
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
        mixed = F.scaled_dot_product_attention(
            _by_text(q[text : text + count], count),
            _by_text(k[rows], count),
            _by_text(v[rows], count),
            enable_gqa=shape.num_heads != shape.num_kv_heads,
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
    """Return [count * L, heads, D] as [count, heads, L, D]."""
    return rows.view(count, -1, *rows.shape[1:]).transpose(1, 2)


def _unpack(packed: Tensor, order: list[int]) -> FloatArray:
    values: FloatArray = packed.float().cpu().numpy()
    logits = np.empty_like(values)
    logits[order] = values
    return logits


def pack_classifier(
    classifier: Classifier, *, max_length: int, threads: int, compile: bool = False
) -> PackedEngine:
    """Take a classifier's weights apart and lay them out for this engine; the classifier is used up.

    Layer by layer, so that memory holds one layer twice and not the model.
    """
    assert classifier.pooling is Pooling.LAST, "a decoder is read at its last token"
    weights = classifier.heads.state_dict()
    heads = {
        head.name: (weights[f"{head.name}.weight"], weights[f"{head.name}.bias"])
        for head in classifier.head_specs
    }
    return PackedEngine(
        take_backbone(classifier, max_length=max_length),
        heads,
        threads=threads,
        pieces=compiled_pieces() if compile else None,
    )


def take_backbone(classifier: Classifier, *, max_length: int) -> Backbone:
    """Lay out the weights of a classifier's backbone; its layers lose theirs."""
    backbone, config = classifier.backbone, classifier.config
    embedding = backbone.embed_tokens.weight.detach()
    blocks = transformer_layers(classifier)
    layers = [
        _take_layer(block, is_last=index == len(blocks) - 1) for index, block in enumerate(blocks)
    ]
    cos, sin = _rotations(backbone.rotary_emb, max_length, like=embedding)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Backbone(
        shape=Shape(
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            eps=config.rms_norm_eps,
        ),
        embedding=embedding,
        layers=layers,
        final_norm=backbone.norm.weight.detach(),
        cos=cos,
        sin=sin,
    )


def _take_layer(block: Any, *, is_last: bool) -> Layer:
    attention, mlp = block.self_attn, block.mlp
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    layer = Layer(
        attention_norm=block.input_layernorm.weight.detach(),
        query_key_norm=_query_key_norm(attention),
        query=_fuse(q) if is_last else None,
        query_key_value=_fuse(k, v) if is_last else _fuse(q, k, v),
        output=_fuse(attention.o_proj),
        mlp_norm=block.post_attention_layernorm.weight.detach(),
        gate_up=_fuse(mlp.gate_proj, mlp.up_proj),
        down=_fuse(mlp.down_proj),
    )
    for linear in (q, k, v, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        linear.weight = None
    return layer


def _query_key_norm(attention: Any) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    heads = attention.q_proj.out_features // attention.head_dim
    kv_heads = attention.k_proj.out_features // attention.head_dim
    weights = (attention.q_norm.weight.detach(), attention.k_norm.weight.detach())
    return torch.cat([w.expand(n, -1) for w, n in zip(weights, (heads, kv_heads), strict=True)])


def _fuse(*linears: Any) -> Linear:
    return make_linear([each.weight for each in linears], [each.bias for each in linears])


def _rotations(rotary: Any, max_length: int, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin [positions, D] for every position that a text may have."""
    positions = torch.arange(max_length, device=like.device).unsqueeze(0)
    with torch.inference_mode():
        cos, sin = rotary(like[:1], positions)
    return cos[0], sin[0]
