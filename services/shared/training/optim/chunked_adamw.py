"""What the variants of AdamW with small moments share: pieces are updated a chunk at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from services.shared.training.optim.stochastic_rounding import Dice


class ChunkedAdamW:
    """The rule without its moments; temporaries in float32 are bounded by the chunk.

    Its random numbers depend on seed, step, rank and parameter, so none need be saved.
    """

    whole: frozenset[str] = frozenset()
    chunk_elements: int

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
        self._state: dict[str, dict[str, Tensor]] = {}
        self._dice = Dice(seed=seed, rank=rank)
        self._betas, self._epsilon = betas, epsilon

    @torch.no_grad()
    def apply(self, pieces: Sequence[Any], learning_rate: float, step: int) -> None:
        """Update `pieces` from their gradients; `step` counts from 0."""
        for piece in pieces:
            gradient = piece.gradient()
            if gradient is None or gradient.numel() == 0:
                continue
            if piece.name not in self._state:
                self._state[piece.name] = self._empty(piece.local)
            generator = self._dice.thrown(piece.local.device, f"{step}/{piece.name}")
            for at in range(0, gradient.numel(), self.chunk_elements):
                part = slice(at, at + self.chunk_elements)
                self._update(
                    piece.local[part],
                    gradient[part],
                    self._part(self._state[piece.name], part),
                    learning_rate=learning_rate,
                    decay=self._decay[piece.name],
                    step=step,
                    generator=generator,
                )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state tensors by piece."""
        return self._state

    def _empty(self, like: Tensor) -> dict[str, Tensor]:
        """Return the moments of a piece that has seen no gradient."""
        raise NotImplementedError

    def _part(self, state: dict[str, Tensor], part: slice) -> dict[str, Tensor]:
        """Return views of one chunk of the state."""
        raise NotImplementedError

    def _update(
        self,
        parameter: Tensor,
        gradient: Tensor,
        state: dict[str, Tensor],
        *,
        learning_rate: float,
        decay: float,
        step: int,
        generator: torch.Generator,
    ) -> None:
        """Update one chunk in place."""
        raise NotImplementedError
