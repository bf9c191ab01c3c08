"""Where the packed engine's weights lie: taken from a classifier, products that read the same input fused.

Legend: H hidden size, A query heads, K key and value heads, D head width, O output width, I input width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from services.api.serving.engines.malloc import trim
from services.api.serving.engines.throttle import rest
from services.shared.model.classifier import Classifier, Pooling, transformer_layers

# oneDNN picks a blocked weight layout for a number of rows; this one was as good as any from 16 to
# 1024 tokens (Zen 4, torch 2.13).
_LAYOUT_ROWS = 256


class Linear(Protocol):
    """Maps [T, I] to [T, O]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        ...


class PlainLinear:
    """The product as torch does it: for accelerators, and processors without oneDNN."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class BlockedLinear:
    """The product with the weight in oneDNN's blocked layout: up to three times as fast for few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _LAYOUT_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, "none", [], ""
        )
        return product


def make_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Return the fastest product for a weight [O, I] where it lies."""
    if weight.device.type == "cpu" and _onednn_multiplies(weight.dtype):
        return BlockedLinear(weight, bias)
    return PlainLinear(weight, bias)


def _onednn_multiplies(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    # Processors without AVX-512 and its like are left to torch, which multiplies bfloat16 anywhere.
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


FAMILIES = frozenset({"qwen3", "qwen2", "llama"})

# Rotary frequencies that do not depend on how long the text is.
_FIXED_ROTATIONS = frozenset({"default", "linear", "llama3", "yarn"})


Heads = Mapping[str, tuple[Tensor, Tensor]]  # (weight [C, H], bias [C]) by head


@dataclass(frozen=True)
class Shape:
    """What the forward needs to know of the configuration."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float


@dataclass(frozen=True)
class Layer:
    """One block. The names of its products are also those of the prepared file."""

    attention_norm: Tensor
    query_key_norm: Tensor | None  # [A + K, D], None where the family has no such norm
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
    embedding: Tensor  # [vocabulary, H]; bfloat16 where it says the same
    layers: list[Layer]
    final_norm: Tensor
    cos: Tensor  # [positions, D]
    sin: Tensor

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the states between the layers."""
        return self.final_norm.dtype

    @property
    def device(self) -> torch.device:
        """Return where the weights lie."""
        return self.final_norm.device


class Product(NamedTuple):
    """One matrix product of a block: weight [O, I] and bias [O]."""

    weight: Tensor
    bias: Tensor | None


ProductT = TypeVar("ProductT")


@dataclass(frozen=True)
class Block(Generic[ProductT]):
    """The weights of one block, fused; `products` by their names in `Layer`."""

    attention_norm: Tensor
    query_key_norm: Tensor | None
    mlp_norm: Tensor
    products: Mapping[str, ProductT]


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


def take_backbone(classifier: Classifier, *, max_length: int) -> Backbone:
    """Lay out the weights of a classifier's backbone, which is used up.

    Block by block, so that memory holds one block twice and not the model.
    """
    module = classifier.backbone
    embedding = _smallest(module.embed_tokens.weight.detach())
    module.embed_tokens.weight = None
    final_norm = module.norm.weight.detach()
    cos, sin = rotations(
        module.rotary_emb.inv_freq,
        module.rotary_emb.attention_scaling,
        max_length=max_length,
        dtype=final_norm.dtype,
    )
    return Backbone(
        shape=shape_of(classifier),
        embedding=embedding,
        layers=[
            make_layer(block, lambda product: make_linear(product.weight, product.bias))
            for block in take_blocks(classifier)
        ],
        final_norm=final_norm,
        cos=cos,
        sin=sin,
    )


def _smallest(embedding: Tensor) -> Tensor:
    """Return an embedding in bfloat16 where that loses nothing, as of a student that was stored so.

    It is read, never multiplied: a quarter of Qwen3-0.6B's weights.
    """
    # Part by part, so that memory does not hold it a third time.
    if all(
        torch.equal(part.bfloat16().to(part.dtype), part) for part in torch.split(embedding, 4096)
    ):
        return embedding.bfloat16()
    return embedding


def shape_of(classifier: Classifier) -> Shape:
    """Return what the forward needs to know of a classifier's configuration."""
    config = classifier.config
    return Shape(
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads,
        eps=config.rms_norm_eps,
    )


def take_blocks(classifier: Classifier) -> Iterator[Block[Product]]:
    """Yield the weights of each block, fused; each block is emptied when the next is asked for."""
    assert classifier.pooling is Pooling.LAST, "a decoder is read at its last token"
    blocks: list[Any] = transformer_layers(classifier)
    for index, block in enumerate(blocks):
        attention, mlp = block.self_attn, block.mlp
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        projections = (
            {"query": _fuse(q), "query_key_value": _fuse(k, v)}
            if index == len(blocks) - 1
            else {"query_key_value": _fuse(q, k, v)}
        )
        yield Block(
            attention_norm=block.input_layernorm.weight.detach(),
            query_key_norm=_query_key_norm(attention),
            mlp_norm=block.post_attention_layernorm.weight.detach(),
            products={
                **projections,
                "output": _fuse(attention.o_proj),
                "gate_up": _fuse(mlp.gate_proj, mlp.up_proj),
                "down": _fuse(mlp.down_proj),
            },
        )
        for linear in (q, k, v, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            linear.weight = None


def make_layer(block: Block[ProductT], make: Callable[[ProductT], Linear]) -> Layer:
    """Return a block whose products are ready to run."""
    trim()  # what the block before was made of
    rest()
    products = {name: make(product) for name, product in block.products.items()}
    return Layer(
        attention_norm=block.attention_norm,
        query_key_norm=block.query_key_norm,
        query=products.get("query"),
        query_key_value=products["query_key_value"],
        output=products["output"],
        mlp_norm=block.mlp_norm,
        gate_up=products["gate_up"],
        down=products["down"],
    )


def rotations(
    frequencies: Tensor, scaling: float, *, max_length: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cos and sin [positions, D] of every position, from frequencies [D / 2] in float32."""
    positions = torch.arange(max_length, device=frequencies.device, dtype=torch.float32)
    angles = torch.outer(positions, frequencies.float()).repeat(1, 2)
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)


def take_heads(classifier: Classifier) -> Heads:
    """Return the weights of a classifier's heads."""
    weights = classifier.heads.state_dict()
    return {
        head.name: (weights[f"{head.name}.weight"], weights[f"{head.name}.bias"])
        for head in classifier.head_specs
    }


def _query_key_norm(attention: Any) -> Tensor | None:
    if not hasattr(attention, "q_norm"):
        return None
    heads = attention.q_proj.out_features // attention.head_dim
    kv_heads = attention.k_proj.out_features // attention.head_dim
    weights = (attention.q_norm.weight.detach(), attention.k_norm.weight.detach())
    return torch.cat([w.expand(n, -1) for w, n in zip(weights, (heads, kv_heads), strict=True)])


def _fuse(*linears: nn.Linear) -> Product:
    """Put the outputs of products that read the same input side by side."""
    weight = torch.cat([each.weight.detach() for each in linears])
    if all(each.bias is None for each in linears):
        return Product(weight, None)
    biases = [
        weight.new_zeros(each.out_features) if each.bias is None else each.bias.detach()
        for each in linears
    ]
    return Product(weight, torch.cat(biases))
