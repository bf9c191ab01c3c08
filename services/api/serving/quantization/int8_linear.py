"""Products of 8-bit numbers: weights scaled by output channel, activations by token.

Legend: T tokens, I input width, O output width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.api.serving.engines.packed_weights import Product

# Activations are stored as unsigned numbers around `zero_of` theirs. oneDNN multiplies unsigned by
# signed with the processor's own instructions; for signed by signed torch 2.13 takes a reference kernel
# that is a thousand times slower.
LARGEST = 127
# Without VNNI (AVX2 alone) the processor adds two products in 16 bits and cuts off what is larger:
# 2 x 127 x 127 just fits.
LARGEST_IN_16_BITS = 63
# A token of zeros has no largest activation to scale by.
_SMALLEST_SCALE = 1e-12


@dataclass(frozen=True)
class QuantisedProduct:
    """A product whose weight [O, I] is int8, to be multiplied by `scale` [O]."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None


def quantise_product(product: Product) -> QuantisedProduct:
    """Round a weight to int8, each output channel scaled by its largest weight."""
    weight = product.weight.float()
    scale = weight.abs().amax(dim=1).clamp_min(_SMALLEST_SCALE) / LARGEST
    rounded = (weight / scale[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)
    return QuantisedProduct(rounded, scale, product.bias)


def zero_of(largest: int) -> int:
    """Return the unsigned number that stands for 0 where `largest` is the largest activation."""
    return largest + 1


def quantise_tokens(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Return tokens [T, I] as uint8, `largest` to either side of zero, and the scale [T, 1] of each."""
    scale = x.abs().amax(dim=-1, keepdim=True).float().clamp_min(_SMALLEST_SCALE) / largest
    # Everything is positive after the shift, so cutting off after adding a half is rounding.
    return (x.float() / scale + (zero_of(largest) + 0.5)).to(torch.uint8), scale


def rescale(y: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return products [T, O] multiplied by the scale [T, 1] of their token."""
    return (y * scale).to(dtype)


def rescale_add(y: Tensor, scale: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return products [T, O] multiplied by the scale of their token, plus a bias [O]."""
    return (y * scale + bias).to(dtype)


@dataclass(frozen=True)
class Conversions:
    """The functions around the product, as they are or compiled."""

    quantise_tokens: Callable[[Tensor, int], tuple[Tensor, Tensor]] = quantise_tokens
    rescale: Callable[[Tensor, Tensor, torch.dtype], Tensor] = rescale
    rescale_add: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor] = rescale_add


def compiled_conversions() -> Conversions:
    """Return the conversions compiled for any number of tokens."""
    return Conversions(
        quantise_tokens=torch.compile(quantise_tokens, dynamic=True),
        rescale=torch.compile(rescale, dynamic=True),
        rescale_add=torch.compile(rescale_add, dynamic=True),
    )


class Int8Linear:
    """Maps [T, I] to [T, O] through the processor's 8-bit instructions."""

    def __init__(self, product: QuantisedProduct, conversions: Conversions) -> None:
        self._largest = largest_activation()
        self._weight = torch.ops.onednn.qlinear_prepack(product.weight, None)
        self._scale = product.scale
        self._zeros = torch.zeros(len(product.scale), dtype=torch.int64)
        self._bias = product.bias
        self._conversions = conversions

    def __call__(self, x: Tensor) -> Tensor:
        tokens, scale = self._conversions.quantise_tokens(x, self._largest)
        y = self.multiply(tokens)
        if self._bias is None:
            return self._conversions.rescale(y, scale, x.dtype)
        return self._conversions.rescale_add(y, scale, self._bias, x.dtype)

    def multiply(self, tokens: Tensor) -> Tensor:
        """Return the float32 product of unsigned tokens, scaled by output channel only."""
        zero = zero_of(self._largest)
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
def largest_activation() -> int:
    """Return the largest 8-bit activation whose products this processor adds up exactly.

    Found by trying: products that overflow 16 bits where pairs of them are added in so many.
    """
    inputs, outputs, tokens = 256, 64, 16  # enough for the kernel that real products take
    weight = torch.full((outputs, inputs), LARGEST, dtype=torch.int8)
    given = _multiply(
        torch.full((tokens, inputs), zero_of(LARGEST) + LARGEST, dtype=torch.uint8),
        zero_of(LARGEST),
        torch.ops.onednn.qlinear_prepack(weight, None),
        torch.ones(outputs),
        torch.zeros(outputs, dtype=torch.int64),
    )
    exact = inputs * LARGEST * LARGEST
    return LARGEST if bool((given == exact).all()) else LARGEST_IN_16_BITS


def processor_has_int8() -> bool:
    """Say whether torch was built with the 8-bit products that this engine uses."""
    return hasattr(torch.ops.onednn, "qlinear_prepack") and torch._C._has_mkldnn
