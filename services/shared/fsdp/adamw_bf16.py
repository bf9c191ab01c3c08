"""AdamW with parameters and moments in bfloat16, rounded stochastically.

Rounding to nearest would lose every update below 2^-9 of a value: a second moment that decays by
0.1 % a step would never move (see `rounding`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from services.shared.fsdp.rounding import Dice, round_into

# Temporaries in float32 are bounded by the chunk, not by the largest parameter.
CHUNK_ELEMENTS = 16 * 2**20


class AdamWBf16:
    """The rule; its random numbers depend on seed, step, rank and parameter, so none need be saved."""

    whole: frozenset[str] = frozenset()
    blocks: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self,
        groups: Sequence[Any],
        *,
        seed: int,
        rank: int,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
    ) -> None:
        self._decay = {p.name: group.weight_decay for group in groups for p in group.pieces}
        self._local = {p.name: p.local for group in groups for p in group.pieces}
        self._moments: dict[str, dict[str, Tensor]] = {}
        self._dice = Dice(seed=seed, rank=rank)
        self._betas, self._epsilon = betas, epsilon

    @torch.no_grad()
    def apply(self, pieces: Sequence[Any], learning_rate: float, step: int) -> None:
        """Update `pieces` from their gradients; `step` counts from 0."""
        for piece in pieces:
            gradient = piece.gradient()
            if gradient is None or gradient.numel() == 0:
                continue
            state = self._moments.get(piece.name)
            if state is None:
                state = {
                    "exp_avg": torch.zeros_like(piece.local, dtype=torch.bfloat16),
                    "exp_avg_sq": torch.zeros_like(piece.local, dtype=torch.bfloat16),
                }
                self._moments[piece.name] = state
            generator = self._dice.thrown(piece.local.device, f"{step}/{piece.name}")
            for at in range(0, gradient.numel(), CHUNK_ELEMENTS):
                part = slice(at, at + CHUNK_ELEMENTS)
                self._update(
                    piece.local[part],
                    gradient[part],
                    state["exp_avg"][part],
                    state["exp_avg_sq"][part],
                    learning_rate=learning_rate,
                    decay=self._decay[piece.name],
                    step=step,
                    generator=generator,
                )

    def _update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        exp_avg: Tensor,
        exp_avg_sq: Tensor,
        *,
        learning_rate: float,
        decay: float,
        step: int,
        generator: torch.Generator,
    ) -> None:
        one, two = self._betas
        g = gradient.float()
        mean = exp_avg.float().lerp_(g, 1 - one)
        square = exp_avg_sq.float().mul_(two).addcmul_(g, g, value=1 - two)
        round_into(exp_avg, mean, generator)
        round_into(exp_avg_sq, square, generator)
        denominator = (square / (1 - two ** (step + 1))).sqrt_().add_(self._epsilon)
        updated = parameter.float().mul_(1 - learning_rate * decay)
        updated.addcdiv_(mean, denominator, value=-learning_rate / (1 - one ** (step + 1)))
        round_into(parameter, updated, generator)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments by piece."""
        return self._moments

    def restore(self, name: str, state: dict[str, Tensor]) -> None:
        """Put back the moments of one piece."""
        self._moments[name] = state
