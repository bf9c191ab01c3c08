"""The weights of a packed decoder: taken from a classifier, with products of the same input fused.

Legend: H hidden size, A query heads, K key and value heads, D head width, T tokens, O output width,
I input width, C labels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from services.api.serving.engines.linear import Linear, LinearWeights, fuse, make_linear
from services.api.serving.engines.malloc import trim_heap
from services.api.serving.engines.throttle import yield_to_requests
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.classifier import Classifier, pooling_of, transformer_layers

DECODER_FAMILIES = frozenset({"qwen3", "qwen2", "llama"})

# Rotary embeddings whose frequencies do not depend on the length of the text.
_FIXED_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})

Heads = Mapping[str, tuple[Tensor, Tensor]]  # (weight [C, H], bias [C]) by head


@dataclass(frozen=True)
class BackboneShape:
    """The parts of the configuration that the forward pass needs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True)
class Layer:
    """One transformer block. The names of its linears are also those in the int8 weights file."""

    attention_norm: Tensor
    query_key_norm: Tensor | None  # [A + K, D], None if the family has no such norm
    query: Linear | None  # the last layer only, which needs the queries of the last tokens alone
    query_key_value: Linear  # in the last layer keys and values
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class Backbone:
    """All weights but the heads; shared by engines that differ in their heads only."""

    shape: BackboneShape
    embedding: Tensor  # [vocabulary, H]; bfloat16 where that is lossless
    layers: list[Layer]
    final_norm: Tensor
    cos: Tensor  # [positions, D]
    sin: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the states between the layers."""
        return self.final_norm.dtype

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.final_norm.device


WeightsT = TypeVar("WeightsT")


@dataclass(frozen=True)
class BlockWeights(Generic[WeightsT]):
    """The weights of one block, fused; `linears` by their names in `Layer`."""

    attention_norm: Tensor
    query_key_norm: Tensor | None
    mlp_norm: Tensor
    linears: Mapping[str, WeightsT]


def decoder_unsupported_reason(config: Any, *, max_length: int) -> str | None:
    """Return why the packed engine cannot run a backbone, None if it can."""
    if pooling_of(config) is not Pooling.LAST:
        return f"pooling is {pooling_of(config)}"
    if config.hidden_act != "silu":
        return f"hidden_act is {config.hidden_act}"
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type not in _FIXED_ROPE_TYPES:
        return f"rope_type is {rope_type}"
    attention_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    window = getattr(config, "sliding_window", None)
    if attention_types != {"full_attention"} and (window is None or window < max_length):
        return f"attention is {', '.join(sorted(attention_types))}"
    return None


def take_decoder(classifier: Classifier, *, max_length: int) -> Backbone:
    """Convert the backbone of a classifier, which is consumed.

    Works block by block, so that at most one block is in memory twice.
    """
    module = classifier.backbone
    embedding = compact_embedding(module.embed_tokens.weight.detach())
    module.embed_tokens.weight = None
    final_norm = module.norm.weight.detach()
    cos, sin = rope_tables(
        module.rotary_emb.inv_freq,
        module.rotary_emb.attention_scaling,
        max_length=max_length,
        dtype=final_norm.dtype,
    )
    return Backbone(
        shape=backbone_shape(classifier),
        embedding=embedding,
        layers=[make_layer(block, make_linear) for block in take_blocks(classifier)],
        final_norm=final_norm,
        cos=cos,
        sin=sin,
    )


def take_heads(classifier: Classifier) -> Heads:
    """Return the weights of a classifier's heads."""
    weights = classifier.heads.state_dict()
    return {
        head.name: (weights[f"{head.name}.weight"], weights[f"{head.name}.bias"])
        for head in classifier.head_specs
    }


def backbone_shape(classifier: Classifier) -> BackboneShape:
    """Return the parts of a classifier's configuration that the forward pass needs."""
    config = classifier.config
    return BackboneShape(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
    )


def take_blocks(classifier: Classifier) -> Iterator[BlockWeights[LinearWeights]]:
    """Yield the fused weights of each block, which is emptied once the next one is requested."""
    assert classifier.pooling is Pooling.LAST, "decoders are read at the last token"
    blocks: list[Any] = transformer_layers(classifier)
    for index, block in enumerate(blocks):
        attention, mlp = block.self_attn, block.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        projections = (
            {"query": fuse(q), "query_key_value": fuse(k, v)}
            if index == len(blocks) - 1
            else {"query_key_value": fuse(q, k, v)}
        )
        yield BlockWeights(
            attention_norm=block.input_layernorm.weight.detach(),
            query_key_norm=_query_key_norm(attention),
            mlp_norm=block.post_attention_layernorm.weight.detach(),
            linears={
                **projections,
                "output": fuse(attention.o_proj),
                "gate_up": fuse(mlp.gate_proj, mlp.up_proj),
                "down": fuse(mlp.down_proj),
            },
        )
        for linear in (q, k, v, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            linear.weight = None


def make_layer(block: BlockWeights[WeightsT], make: Callable[[WeightsT], Linear]) -> Layer:
    """Return a layer whose linears are made from the weights of a block."""
    trim_heap()  # returns what the previous block was made from
    yield_to_requests()
    linears = {name: make(weights) for name, weights in block.linears.items()}
    return Layer(
        attention_norm=block.attention_norm,
        query_key_norm=block.query_key_norm,
        query=linears.get("query"),
        query_key_value=linears["query_key_value"],
        output=linears["output"],
        mlp_norm=block.mlp_norm,
        gate_up=linears["gate_up"],
        down=linears["down"],
    )


def rope_tables(
    frequencies: Tensor, scaling: float, *, max_length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [positions, D] of every position, from frequencies [D / 2] in float32."""
    positions = torch.arange(max_length, device=frequencies.device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies.float()).repeat(1, 2)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def compact_embedding(embedding: Tensor) -> Tensor:
    """Return an embedding in bfloat16 if that is lossless, as for a student stored in bfloat16.

    It is only looked up, never multiplied, and is a quarter of Qwen3-0.6B's weights.
    """
    # In parts, so that memory does not hold it a third time.
    if all(
        torch.equal(part.bfloat16().to(part.dtype), part) for part in torch.split(embedding, 4096)
    ):
        return embedding.bfloat16()
    return embedding


def _query_key_norm(attention: Any) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    heads = attention.q_proj.out_features // attention.head_dim
    kv_heads = attention.k_proj.out_features // attention.head_dim
    weights = (attention.q_norm.weight.detach(), attention.k_norm.weight.detach())
    return torch.cat([w.expand(n, -1) for w, n in zip(weights, (heads, kv_heads), strict=True)])
