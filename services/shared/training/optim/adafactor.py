"""Adafactor over shards: second moments kept as one mean per row and one per column.

The algorithm is torch.optim.Adafactor's (torch 2.13, no momentum: Shazeer and Stern 2018), but its
statistics are those of whole matrices: a rank that holds some rows, or a range that starts within a
row, adds its part and the ranks sum. Rank-count independent, on FSDP1's flat shards too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from services.shared.training.optim.parameter_groups import ParameterGroup
from services.shared.training.optim.stochastic_rounding import SeededGenerators, round_into
from services.shared.training.sharding.shard import LocalShard

BETA2_DECAY = -0.8  # Shazeer and Stern, section 7.2
EPSILON_PARAMETER = 1e-3  # their epsilon 2
EPSILON = torch.finfo(torch.float32).eps  # torch's default for float32
CLIP = 1.0  # their d


class Adafactor:
    """The update rule; row and column means are whole on every rank, vectors' moments cut like the shard."""

    whole: frozenset[str] = frozenset({"row_var", "col_var"})
    blocks: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self, groups: Sequence[ParameterGroup], *, replicated: bool, seed: int, rank: int
    ) -> None:
        self._decay = {p.name: group.weight_decay for group in groups for p in group.shards}
        self._devices = {p.name: p.local.device for group in groups for p in group.shards}
        self._replicated = replicated
        self._state: dict[str, dict[str, Tensor]] = {}
        # Replicas must round alike.
        self._generators = SeededGenerators(seed=seed, rank=0 if replicated else rank)

    @torch.no_grad()
    def apply(self, shards: Sequence[LocalShard], learning_rate: float, step: int) -> None:
        """Update `shards` from their gradients, one by one; every rank must hold them all in turn."""
        beta = 1 - float(step + 1) ** BETA2_DECAY
        rate = min(learning_rate, (step + 1) ** -0.5)
        for shard in shards:
            gradient = shard.gradient()
            if gradient is None:
                gradient = torch.zeros_like(shard.local)
            generator = self._generators.for_label(shard.local.device, f"{step}/{shard.name}")
            current = shard.local.float()
            update, scale = self._update(shard, current, gradient.float(), beta=beta)
            updated = current * (1 - learning_rate * self._decay[shard.name])
            round_into(shard.local, updated.add_(update, alpha=-scale * rate), generator)

    def _update(
        self, shard: LocalShard, current: Tensor, gradient: Tensor, *, beta: float
    ) -> tuple[Tensor, float]:
        """Return the direction [n] and its length in units of the relative rate."""
        squares = gradient.square()
        if len(shard.shape) > 1:
            second_moment = self._factored(shard, squares, beta=beta)
        else:
            state = self._state.setdefault(shard.name, {"variance": torch.zeros_like(squares)})
            second_moment = state["variance"].lerp_(squares, 1 - beta).clone()
        update = second_moment.clamp_(min=EPSILON**2).rsqrt_().mul_(gradient)
        sums = torch.stack([current.square().sum(), update.square().sum()])
        self._all_reduce(sums)
        parameter_rms, update_rms = (sums / shard.num_elements).sqrt().tolist()
        return update, max(EPSILON_PARAMETER, parameter_rms) / max(1.0, update_rms / CLIP)

    def _factored(self, shard: LocalShard, squares: Tensor, *, beta: float) -> Tensor:
        """Update the row and column means and return the second moment of each element, [n]."""
        columns = shard.shape[-1]
        rows = shard.num_elements // columns
        device = squares.device
        state = self._state.setdefault(
            shard.name,
            {
                "row_var": torch.zeros(rows, device=device),
                "col_var": torch.zeros(columns, device=device),
            },
        )
        first, last = shard.start // columns, -(-shard.stop // columns)
        # A range that starts or ends within a row is padded to whole rows: at most two rows more.
        padded = squares.new_zeros((last - first) * columns)
        at = shard.start - first * columns
        padded[at : at + len(squares)] = squares
        matrix = padded.view(-1, columns)
        sums = squares.new_zeros(rows + columns)
        sums[first:last] = matrix.sum(dim=1)
        sums[rows:] = matrix.sum(dim=0)
        self._all_reduce(sums)
        state["row_var"].lerp_(sums[:rows] / columns, 1 - beta)
        state["col_var"].lerp_(sums[rows:] / rows, 1 - beta)
        mean = state["row_var"].mean().clamp(min=EPSILON)
        outer = (state["row_var"][first:last, None] * state["col_var"][None, :]).div_(mean)
        return outer.view(-1)[at : at + len(squares)]

    def _all_reduce(self, values: Tensor) -> None:
        if not self._replicated:
            dist.all_reduce(values)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the second moments by shard."""
        return self._state

    def restore(self, name: str, state: dict[str, Tensor]) -> None:
        """Restore the state of one shard."""
        device = self._devices[name]
        self._state[name] = {key: value.to(device) for key, value in state.items()}
