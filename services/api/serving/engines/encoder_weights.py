"""The weights of a packed encoder: BERT, RoBERTa, XLM-R and ModernBERT, taken from a classifier.

Legend: H hidden size, A heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor, nn

from services.api.serving.engines.linear import (
    ACTIVATIONS,
    Activation,
    Linear,
    LinearWeights,
    fuse,
    make_linear,
)
from services.api.serving.engines.malloc import trim_heap
from services.api.serving.engines.packed_weights import WeightsT, compact_embedding, rope_tables
from services.api.serving.engines.throttle import yield_to_requests
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.classifier import Classifier, transformer_layers

# RoBERTa counts positions from the padding token's id on.
_OFFSET_FAMILIES = frozenset({"roberta", "xlm-roberta"})
_POST_NORM_FAMILIES = _OFFSET_FAMILIES | {"bert"}
ENCODER_FAMILIES = _POST_NORM_FAMILIES | {"modernbert"}


class Norm(NamedTuple):
    """The weight and bias [H] of a LayerNorm."""

    weight: Tensor
    bias: Tensor | None

    def to(self, dtype: torch.dtype) -> Norm:
        """Return the norm in another dtype."""
        return Norm(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


@dataclass(frozen=True)
class EncoderShape:
    """The parts of the configuration that the forward pass needs."""

    num_heads: int
    head_dim: int
    eps: float
    pooling: Pooling
    activation: Activation
    post_norm: (
        bool  # BERT normalises after each residual, ModernBERT before each sublayer and at the end
    )
    padding_id: int | None = None  # positions are counted from it on; None: from 0
    window: int | None = None  # tokens that local layers see on each side


@dataclass(frozen=True)
class EncoderLayer:
    """One transformer block. The names of its linears are also those in the int8 weights file."""

    attention_norm: Norm | None  # None in ModernBERT's first layer
    mlp_norm: Norm
    is_local: bool
    query: Linear | None  # the last layer only, where the heads read the first token alone
    query_key_value: Linear  # in such a last layer keys and values
    output: Linear
    up: Linear  # with its activation; of ModernBERT the gated input and the gate, without
    down: Linear


class Rope(NamedTuple):
    """Cosines and sines [positions, D]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class EncoderBackbone:
    """All weights but the heads; shared by engines that differ in their heads only."""

    shape: EncoderShape
    words: Tensor  # [vocabulary, H]; bfloat16 where that is lossless
    positions: Tensor | None  # [positions, H]
    types: Tensor | None  # [types, H]
    embedding_norm: Norm
    ropes: dict[bool, Rope]  # of local layers (True) and of others
    layers: list[EncoderLayer]
    final_norm: Norm | None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the states between the layers."""
        return self.embedding_norm.weight.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.embedding_norm.weight.device


@dataclass(frozen=True)
class EncoderBlock(Generic[WeightsT]):
    """The weights of one block, fused; `linears` by their names in `EncoderLayer`."""

    attention_norm: Norm | None
    mlp_norm: Norm
    is_local: bool
    linears: Mapping[str, WeightsT]


def encoder_unsupported_reason(config: Any, *, max_length: int) -> str | None:
    """Return why the packed engine cannot run an encoder, None if it can."""
    is_modern = config.model_type == "modernbert"
    activation = config.hidden_activation if is_modern else config.hidden_act
    if activation not in ACTIVATIONS:
        return f"its activation is {activation}"
    if getattr(config, "is_decoder", False):
        return "it is a decoder"
    if is_modern:
        types = {each.get("rope_type", "default") for each in config.rope_parameters.values()}
        return None if types == {"default"} else f"rope_type is {', '.join(sorted(types))}"
    if getattr(config, "position_embedding_type", "absolute") not in (None, "absolute"):
        return f"its positions are {config.position_embedding_type}"
    first = config.pad_token_id + 1 if config.model_type in _OFFSET_FAMILIES else 0
    longest = config.max_position_embeddings - first
    return None if max_length <= longest else f"it has positions for {longest} tokens"


def take_encoder(classifier: Classifier, *, max_length: int) -> EncoderBackbone:
    """Convert the backbone of a classifier, which is consumed.

    Works block by block, so that at most one block is in memory twice.
    """
    return EncoderBackbone(
        **take_embeddings(classifier, max_length=max_length),
        layers=[
            make_encoder_layer(block, make_linear) for block in take_encoder_blocks(classifier)
        ],
    )


def take_embeddings(classifier: Classifier, *, max_length: int) -> dict[str, Any]:
    """Return the fields of an EncoderBackbone but its layers."""
    backbone, shape = classifier.backbone, encoder_shape(classifier)
    embeddings: Any = backbone.embeddings
    word = embeddings.word_embeddings if shape.post_norm else embeddings.tok_embeddings
    fields: dict[str, Any] = {
        "shape": shape,
        "words": compact_embedding(word.weight.detach()),
        "positions": None,
        "types": None,
        "ropes": {},
        "final_norm": None,
    }
    word.weight = None
    if shape.post_norm:
        return fields | {
            "positions": embeddings.position_embeddings.weight.detach(),
            "types": embeddings.token_type_embeddings.weight.detach(),
            "embedding_norm": _norm(embeddings.LayerNorm),
        }
    final_norm = _norm(backbone.final_norm)
    rotary: Any = backbone.rotary_emb
    names = {False: "full_attention", True: "sliding_attention"}
    return fields | {
        "embedding_norm": _norm(embeddings.norm),
        "final_norm": final_norm,
        "ropes": {
            is_local: Rope(
                *rope_tables(
                    getattr(rotary, f"{name}_inv_freq"),
                    getattr(rotary, f"{name}_attention_scaling"),
                    max_length=max_length,
                    dtype=final_norm.weight.dtype,
                )
            )
            for is_local, name in names.items()
            if hasattr(rotary, f"{name}_inv_freq")
        },
    }


def encoder_shape(classifier: Classifier) -> EncoderShape:
    """Return the parts of a classifier's configuration that the forward pass needs."""
    config: Any = classifier.config
    post_norm = config.model_type in _POST_NORM_FAMILIES
    return EncoderShape(
        num_heads=config.num_attention_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        eps=config.layer_norm_eps if post_norm else config.norm_eps,
        pooling=classifier.pooling,
        activation=ACTIVATIONS[config.hidden_act if post_norm else config.hidden_activation],
        post_norm=post_norm,
        padding_id=config.pad_token_id if config.model_type in _OFFSET_FAMILIES else None,
        window=None if post_norm else config.sliding_window,
    )


def take_encoder_blocks(classifier: Classifier) -> Iterator[EncoderBlock[LinearWeights]]:
    """Yield the fused weights of each block, which is emptied once the next one is requested."""
    shape = encoder_shape(classifier)
    layers = transformer_layers(classifier)
    take = _bert_block if shape.post_norm else _modernbert_block
    for index, layer in enumerate(layers):
        is_last = index == len(layers) - 1
        yield take(layer, shape, first_token_only=is_last and shape.pooling is Pooling.FIRST)
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight = None  # type: ignore[assignment]


def make_encoder_layer(
    block: EncoderBlock[WeightsT], make: Callable[[WeightsT], Linear]
) -> EncoderLayer:
    """Return a layer whose linears are made from the weights of a block."""
    trim_heap()  # returns what the previous block was made from
    yield_to_requests()
    linears = {name: make(weights) for name, weights in block.linears.items()}
    return EncoderLayer(
        attention_norm=block.attention_norm,
        mlp_norm=block.mlp_norm,
        is_local=block.is_local,
        query=linears.get("query"),
        query_key_value=linears["query_key_value"],
        output=linears["output"],
        up=linears["up"],
        down=linears["down"],
    )


def _bert_block(
    layer: Any, shape: EncoderShape, *, first_token_only: bool
) -> EncoderBlock[LinearWeights]:
    own = layer.attention.self
    whole = fuse(own.query, own.key, own.value)
    return EncoderBlock(
        attention_norm=_norm(layer.attention.output.LayerNorm),
        mlp_norm=_norm(layer.output.LayerNorm),
        is_local=False,
        linears={
            **_projections(whole, first_token_only=first_token_only),
            "output": fuse(layer.attention.output.dense),
            "up": fuse(layer.intermediate.dense, activation=shape.activation),
            "down": fuse(layer.output.dense),
        },
    )


def _modernbert_block(
    layer: Any, _shape: EncoderShape, *, first_token_only: bool
) -> EncoderBlock[LinearWeights]:
    has_norm = isinstance(layer.attn_norm, nn.LayerNorm)
    return EncoderBlock(
        attention_norm=_norm(layer.attn_norm) if has_norm else None,
        mlp_norm=_norm(layer.mlp_norm),
        is_local=layer.attention_type == "sliding_attention",
        linears={
            **_projections(fuse(layer.attn.Wqkv), first_token_only=first_token_only),
            "output": fuse(layer.attn.Wo),
            "up": fuse(layer.mlp.Wi),
            "down": fuse(layer.mlp.Wo),
        },
    )


def _projections(whole: LinearWeights, *, first_token_only: bool) -> dict[str, LinearWeights]:
    """Return the projections of a layer from the weight [3 H, H] of queries, keys and values."""
    if not first_token_only:
        return {"query_key_value": whole}
    size = whole.weight.shape[0] // 3
    bias = whole.bias
    return {
        "query": LinearWeights(whole.weight[:size], None if bias is None else bias[:size]),
        "query_key_value": LinearWeights(
            whole.weight[size:], None if bias is None else bias[size:]
        ),
    }


def _norm(module: nn.LayerNorm) -> Norm:
    bias = module.bias
    return Norm(module.weight.detach(), None if bias is None else bias.detach())
