"""AdamW with parameters and moments in bfloat16, rounded stochastically.

Rounding to nearest would lose every update below 2^-9 of a value: a second moment that decays by
0.1 % a step would never move (see `stochastic_rounding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from services.shared.training.optim.chunked_adamw import ChunkedAdamW
from services.shared.training.optim.stochastic_rounding import round_into


class AdamWBf16(ChunkedAdamW):
    """The update rule."""

    blocks: Mapping[str, int] = MappingProxyType({})
    chunk_elements = 16 * 2**20

    def _empty(self, like: Tensor) -> dict[str, Tensor]:
        return {
            key: torch.zeros_like(like, dtype=torch.bfloat16) for key in ("exp_avg", "exp_avg_sq")
        }

    def _part(self, state: dict[str, Tensor], part: slice) -> dict[str, Tensor]:
        return {key: value[part] for key, value in state.items()}

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
        exp_avg, exp_avg_sq = state["exp_avg"], state["exp_avg_sq"]
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

    def restore(self, name: str, state: dict[str, Tensor]) -> None:
        """Restore the moments of one shard."""
        self._state[name] = state
