"""Rounding float32 to bfloat16 up or down at random, so that small updates survive on average.

Gupta et al. 2015, "Deep learning with limited numerical precision"; Zamirai et al. 2020, "Revisiting
BFloat16 training".
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor


class SeededGenerators:
    """Random generators that depend only on seed, rank and a label, so none need be saved."""

    def __init__(self, *, seed: int, rank: int) -> None:
        self._prefix = f"{seed}/{rank}"
        self._generators: dict[torch.device, torch.Generator] = {}

    def for_label(self, device: torch.device, label: str) -> torch.Generator:
        """Return the device's generator, seeded for `label`."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        digest = hashlib.sha256(f"{self._prefix}/{label}".encode()).digest()
        return self._generators[device].manual_seed(int.from_bytes(digest[:7], "big"))


def round_into(target: Tensor, values: Tensor, generator: torch.Generator) -> None:
    """Write float32 `values` into a bfloat16 target, up or down with probability by distance.

    A float32 holds a bfloat16 in its upper 16 bits: adding 16 random bits carries into them exactly
    as often as the lower bits are far from zero. Non-finite values are copied unchanged. A float32
    target is written exactly.
    """
    if target.dtype != torch.bfloat16:
        target.copy_(values)
        return
    bits = values.view(torch.int32)
    noise = torch.randint(
        0, 2**16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    rounded = noise.add_(bits).bitwise_and_(-(2**16)).view(torch.float32)
    target.copy_(torch.where(values.isfinite(), rounded, values))
