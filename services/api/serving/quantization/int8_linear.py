"""8-bit matrix products: weights quantized per output channel, activations per token.

Legend: T tokens, I input width, O output width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.api.serving.engines.linear import Activation, LinearWeights, activate

# The largest quantized magnitude of weights and activations. Activations are stored as unsigned numbers
# around a zero point: oneDNN multiplies unsigned by signed with the CPU's 8-bit instructions; for signed
# by signed torch 2.13 uses a reference kernel that is a thousand times slower.
INT8_MAX = 127
# Without VNNI (AVX2 only) the CPU adds pairs of products in 16 bits with saturation: with unsigned
# activations of at most 2 x 63 + 1 = 127, a pair of products is at most 2 x 127 x 127, which just fits.
INT8_MAX_WITHOUT_VNNI = 63
# Avoids a division by zero for a token of zeros.
_SMALLEST_SCALE = 1e-12


@dataclass(frozen=True)
class Int8Weights:
    """An int8 weight [O, I], its scale [O] and the bias [O] of a matrix product, and what follows it."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    activation: Activation = Activation.NONE


def quantize_weights(linear: LinearWeights) -> Int8Weights:
    """Round a weight to int8, each output channel scaled by its largest weight."""
    weight = linear.weight.float()
    scale = weight.abs().amax(dim=1).clamp_min(_SMALLEST_SCALE) / INT8_MAX
    rounded = (weight / scale[:, None]).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return Int8Weights(rounded, scale, linear.bias, linear.activation)


def zero_point(limit: int) -> int:
    """Return the unsigned number that represents 0 if activations are limited to +-`limit`."""
    return limit + 1


def quantize_activations(x: Tensor, limit: int) -> tuple[Tensor, Tensor]:
    """Return activations [T, I] as uint8, +-`limit` around the zero point, and their scales [T, 1]."""
    scale = x.abs().amax(dim=-1, keepdim=True).float().clamp_min(_SMALLEST_SCALE) / limit
    # All values are positive after the shift, so truncating after adding a half rounds.
    return (x.float() / scale + (zero_point(limit) + 0.5)).to(torch.uint8), scale


def dequantize(y: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return products [T, O] multiplied by the scale [T, 1] of their token."""
    return (y * scale).to(dtype)


def dequantize_add_bias(y: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return products [T, O] multiplied by the scale of their token, plus a bias [O]."""
    return (y * scale + bias).to(dtype)


@dataclass(frozen=True)
class Int8Ops:
    """The elementwise operations around the product, eager by default."""

    quantize_activations: Callable[[Tensor, int], tuple[Tensor, Tensor]] = quantize_activations
    dequantize: Callable[[Tensor, Tensor, torch.dtype], Tensor] = dequantize
    dequantize_add_bias: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor] = (
        dequantize_add_bias
    )


def compiled_int8_ops() -> Int8Ops:
    """Return the operations compiled for any number of tokens."""
    return Int8Ops(
        quantize_activations=torch.compile(quantize_activations, dynamic=True),
        dequantize=torch.compile(dequantize, dynamic=True),
        dequantize_add_bias=torch.compile(dequantize_add_bias, dynamic=True),
    )


class Int8Linear:
    """Maps [T, I] to [T, O] with the CPU's 8-bit instructions."""

    def __init__(self, weights: Int8Weights, ops: Int8Ops) -> None:
        self._limit = activation_limit()
        self._weight = torch.ops.onednn.qlinear_prepack(weights.weight, None)
        self._scale = weights.scale
        self._zeros = torch.zeros(len(weights.scale), dtype=torch.int64)
        self._bias = weights.bias
        self._activation = weights.activation
        self._conversions = ops

    def __call__(self, x: Tensor) -> Tensor:
        tokens, scale = self._conversions.quantize_activations(x, self._limit)
        y = self.multiply(tokens)
        if self._bias is None:
            y = self._conversions.dequantize(y, scale, x.dtype)
        else:
            y = self._conversions.dequantize_add_bias(y, scale, self._bias, x.dtype)
        return activate(y, self._activation)

    def multiply(self, tokens: Tensor) -> Tensor:
        """Return the float32 product of quantized activations, scaled per output channel only."""
        zero = zero_point(self._limit)
        return _multiply(tokens, zero, self._weight, self._scale, self._zeros)


def _multiply(tokens: Tensor, zero: int, weight: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    product: Tensor = torch.ops.onednn.qlinear_pointwise(
        tokens,
        1.0,
        zero,
        weight,
        scale,
        zeros,
        None,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        "",
    )
    return product


@functools.cache
def activation_limit() -> int:
    """Return the largest quantized activation whose products this CPU adds up exactly.

    Found by computing products that overflow where pairs of them are added in 16 bits.
    """
    inputs, outputs, tokens = (
        256,
        64,
        16,
    )  # large enough to select the kernel that real products use
    weight = torch.full((outputs, inputs), INT8_MAX, dtype=torch.int8)
    given = _multiply(
        torch.full((tokens, inputs), zero_point(INT8_MAX) + INT8_MAX, dtype=torch.uint8),
        zero_point(INT8_MAX),
        torch.ops.onednn.qlinear_prepack(weight, None),
        torch.ones(outputs),
        torch.zeros(outputs, dtype=torch.int64),
    )
    exact = inputs * INT8_MAX * INT8_MAX
    return INT8_MAX if bool((given == exact).all()) else INT8_MAX_WITHOUT_VNNI


def cpu_supports_int8() -> bool:
    """Return whether torch was built with the 8-bit products that the int8 engine uses."""
    return hasattr(torch.ops.onednn, "qlinear_prepack") and torch._C._has_mkldnn
