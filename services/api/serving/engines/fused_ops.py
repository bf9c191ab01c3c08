"""What happens between the matrix products: small functions, the same for all layers.

Small enough to compile in seconds where a compiler is at hand; a whole model takes minutes.

Legend: T packed tokens, W width, Q query and key heads together, D head width, M inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each token [T, W] by its root mean square, in float32 inside."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum [T, W] and its norm."""
    total = x + update
    return total, norm(total, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads [T, Q, D] by their position; cos and sin are [T, 1, D]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + turned * sin


def norm_rotate(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Norm each head [T, Q, D] by itself, weights [Q, D], then rotate it."""
    return rotate(norm(x, weight, eps), cos, sin)


def gate(x: Tensor) -> Tensor:
    """Return silu(first half) * second half: [T, 2 M] -> [T, M]."""
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


@dataclass(frozen=True)
class Pieces:
    """The functions as they are, or compiled."""

    norm: Callable[[Tensor, Tensor, float], Tensor] = norm
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_norm
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = rotate
    norm_rotate: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor] = norm_rotate
    gate: Callable[[Tensor], Tensor] = gate


def compiled_pieces() -> Pieces:
    """Return the pieces compiled for any number of tokens; the first call of each takes a second."""
    return Pieces(
        norm=torch.compile(norm, dynamic=True),
        add_norm=torch.compile(add_norm, dynamic=True),
        rotate=torch.compile(rotate, dynamic=True),
        norm_rotate=torch.compile(norm_rotate, dynamic=True),
        gate=torch.compile(gate, dynamic=True),
    )
