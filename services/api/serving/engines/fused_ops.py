"""The elementwise operations between the matrix products, the same for all layers.

Small enough to be compiled in seconds where there is a compiler; a whole model takes minutes.

Legend: T packed tokens, W width, Q query and key heads together, D head width, M inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each token [T, W] by its root mean square, computed in float32, and apply the weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum [T, W] and its RMS norm."""
    total = x + update
    return total, rms_norm(total, weight, eps)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to heads [T, Q, D]; cos and sin are [T, 1, D]."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def rms_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Normalise each head of [T, Q, D] with weights [Q, D], then apply rotary position embeddings."""
    return apply_rope(rms_norm(x, weight, eps), cos, sin)


def swiglu(x: Tensor) -> Tensor:
    """Return silu(first half) * second half: [T, 2 M] -> [T, M]."""
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


@dataclass(frozen=True)
class FusedOps:
    """The operations, eager by default."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = add_rms_norm
    apply_rope: Callable[[Tensor, Tensor, Tensor], Tensor] = apply_rope
    rms_norm_rope: Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor] = rms_norm_rope
    swiglu: Callable[[Tensor], Tensor] = swiglu


def compiled_ops() -> FusedOps:
    """Return the operations compiled for any number of tokens; the first call of each takes a second."""
    return FusedOps(
        rms_norm=torch.compile(rms_norm, dynamic=True),
        add_rms_norm=torch.compile(add_rms_norm, dynamic=True),
        apply_rope=torch.compile(apply_rope, dynamic=True),
        rms_norm_rope=torch.compile(rms_norm_rope, dynamic=True),
        swiglu=torch.compile(swiglu, dynamic=True),
    )
