"""Matrix products of the packed engine, each in the fastest layout of its device.

Legend: T tokens, O output width, I input width.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# oneDNN picks a blocked weight layout for a number of rows; this one was as good as any from 16 to
# 1024 tokens (Zen 4, torch 2.13).
_LAYOUT_ROWS = 256


class Activation(str, Enum):
    """What follows a product element by element; oneDNN computes it before the result leaves the cache."""

    NONE = "none"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    SILU = "silu"

    __str__ = str.__str__


# The names of transformers' ACT2FN.
ACTIVATIONS = {
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "silu": Activation.SILU,
}
_FUNCTIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.RELU: F.relu,
    Activation.SILU: F.silu,
}
# attr and algorithm of `_linear_pointwise`.
_FUSED = {
    Activation.NONE: ("none", ""),
    Activation.GELU: ("gelu", "none"),
    Activation.GELU_TANH: ("gelu", "tanh"),
    Activation.RELU: ("relu", ""),
    Activation.SILU: ("swish", ""),
}


class Linear(Protocol):
    """Maps [T, I] to [T, O]."""

    def __call__(self, x: Tensor) -> Tensor:
        """Return the product."""
        ...


class LinearWeights(NamedTuple):
    """The weight [O, I] and bias [O] of one matrix product, and what follows it."""

    weight: Tensor
    bias: Tensor | None
    activation: Activation = Activation.NONE


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply an activation."""
    return x if activation is Activation.NONE else _FUNCTIONS[activation](x)


def make_linear(weights: LinearWeights) -> Linear:
    """Return the fastest product on the device of its weight."""
    weight = weights.weight
    if weight.device.type == "cpu" and _onednn_supports(weight.dtype):
        return BlockedLinear(weights)
    return PlainLinear(weights)


class PlainLinear:
    """The product as torch computes it: for accelerators, and CPUs without oneDNN."""

    def __init__(self, weights: LinearWeights) -> None:
        self._weights = weights._replace(weight=weights.weight.contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        product = F.linear(x, self._weights.weight, self._weights.bias)
        return activate(product, self._weights.activation)


class BlockedLinear:
    """The product with the weight in oneDNN's blocked layout: up to three times as fast for few rows."""

    def __init__(self, weights: LinearWeights) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weights.weight, _LAYOUT_ROWS)
        self._bias = weights.bias
        self._post = _FUSED[weights.activation]

    def __call__(self, x: Tensor) -> Tensor:
        attribute, algorithm = self._post
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._weight, self._bias, attribute, [], algorithm
        )
        return product


def fuse(*linears: nn.Linear, activation: Activation = Activation.NONE) -> LinearWeights:
    """Concatenate the outputs of linears that read the same input."""
    weight = torch.cat([each.weight.detach() for each in linears])
    if all(each.bias is None for each in linears):
        return LinearWeights(weight, None, activation)
    biases = [
        weight.new_zeros(each.out_features) if each.bias is None else each.bias.detach()
        for each in linears
    ]
    return LinearWeights(weight, torch.cat(biases), activation)


def _onednn_supports(dtype: torch.dtype) -> bool:
    if not torch._C._has_mkldnn:
        return False
    # oneDNN needs AVX-512 or the like for bfloat16; torch multiplies it on any CPU.
    return dtype is torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
