"""The base of AdamW variants with small moments: shards are updated a chunk at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from services.shared.training.optim.parameter_groups import ParameterGroup
from services.shared.training.optim.stochastic_rounding import SeededGenerators
from services.shared.training.sharding.shard import LocalShard


class ChunkedAdamW:
    """The update rule without its moments; temporaries in float32 are bounded by the chunk.

    Its random numbers depend on seed, step, rank and parameter, so none need be saved.
    """

    whole: frozenset[str] = frozenset()
    chunk_elements: int

    def __init__(
        self,
        groups: Sequence[ParameterGroup],
        *,
        seed: int,
        rank: int,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
    ) -> None:
        self._decay = {p.name: group.weight_decay for group in groups for p in group.shards}
        self._state: dict[str, dict[str, Tensor]] = {}
        self._generators = SeededGenerators(seed=seed, rank=rank)
        self._betas, self._epsilon = betas, epsilon

    @torch.no_grad()
    def apply(self, shards: Sequence[LocalShard], learning_rate: float, step: int) -> None:
        """Update `shards` from their gradients; `step` counts from 0."""
        for shard in shards:
            gradient = shard.gradient()
            if gradient is None or gradient.numel() == 0:
                continue
            if shard.name not in self._state:
                self._state[shard.name] = self._empty(shard.local)
            generator = self._generators.for_label(shard.local.device, f"{step}/{shard.name}")
            for at in range(0, gradient.numel(), self.chunk_elements):
                part = slice(at, at + self.chunk_elements)
                self._update(
                    shard.local[part],
                    gradient[part],
                    self._part(self._state[shard.name], part),
                    learning_rate=learning_rate,
                    decay=self._decay[shard.name],
                    step=step,
                    generator=generator,
                )

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state tensors by shard."""
        return self._state

    def _empty(self, like: Tensor) -> dict[str, Tensor]:
        """Return the moments of a shard that has seen no gradient."""
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
