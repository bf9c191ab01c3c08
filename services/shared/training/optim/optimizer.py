"""When gradients are applied: at the end of a step, or unit by unit within the backward pass.

Applied within the backward pass, no gradient outlives its unit: 4 of the 16 bytes per parameter of
mixed-precision AdamW are never all alive. A step of several micro-batches still has to keep the sum
of the earlier ones; only the last backward pass of a step applies anything.

Clipping. At the end of a step: by the norm over all parameters and ranks, as usual. Within the
backward pass that norm is not known when the first gradient is applied, so each unit is clipped by
its own norm to `max_grad_norm / sqrt(number of units)`: the norm over all units then never exceeds
`max_grad_norm`. FSDP1 shows a unit's gradient whole only while it is reduced, once per micro-batch,
so there each micro-batch is clipped to its share of that limit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms._comm_hooks.default_hooks import (
    DefaultState,
    allreduce_hook,
    reduce_scatter_hook,
)

from services.shared.jobs.spec import Schedule, Training
from services.shared.jobs.state import Reason
from services.shared.memory.recipe import Engine
from services.shared.training.optim.update_rules import UpdateRule, build_rule
from services.shared.training.process import RunFailed, World
from services.shared.training.sharding.shard import LocalShard, Sharded


class Optimizer(Protocol):
    """Applies gradients by a rule."""

    rule: UpdateRule

    def before_backward(self, *, learning_rate: float, step: int, part: int, parts: int) -> None:
        """Announce micro-batch `part` of `parts` of a step; `step` and `part` count from 0."""
        ...

    def step(self) -> float | None:
        """Apply the remaining gradients, free them all, and return the norm before clipping.

        The norm is None where none was measured. Raises RunFailed(NON_FINITE_LOSS) on all ranks
        for a gradient that is not finite.
        """
        ...


def build_optimizer(sharded: Sharded, training: Training, world: World) -> Optimizer:
    """Return the optimizer of a recipe. Raises RunFailed(BAD_SPEC) for one that cannot run here."""
    recipe = sharded.recipe
    rule = build_rule(sharded, training, rank=world.rank)
    if not recipe.optimizer_in_backward:
        return StepOptimizer(sharded, rule, training)
    if sharded.engine is Engine.FSDP2:
        return BackwardOptimizer(sharded, rule, training)
    if recipe.optimizer == "adafactor":
        raise RunFailed(
            Reason.BAD_SPEC,
            "recipe: adafactor cannot be applied in the backward pass under FSDP1 (torch 2.5), "
            "whose ranks see different parameters; it keeps little state, so leave it to the end",
        )
    return Fsdp1BackwardOptimizer(sharded, rule, training)


def learning_rate(step: int, total: int, training: Training) -> float:
    """Return the rate of step `step` (from 0) of `total`: linear warm-up, then the schedule to 0."""
    warmup = math.ceil(training.warmup_ratio * total)
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    share = (step - warmup) / max(1, total - warmup)
    if training.schedule is Schedule.LINEAR:
        return training.learning_rate * (1 - share)
    if training.schedule is Schedule.COSINE:
        return training.learning_rate * 0.5 * (1 + math.cos(math.pi * share))
    return training.learning_rate


class StepOptimizer:
    """Applies all gradients at the end of a step."""

    def __init__(self, sharded: Sharded, rule: UpdateRule, training: Training) -> None:
        self.rule = rule
        self._sharded = sharded
        self._limit = training.max_grad_norm
        self._learning_rate = 0.0
        self._step = 0

    def before_backward(self, *, learning_rate: float, step: int, part: int, parts: int) -> None:
        del part, parts
        self._learning_rate, self._step = learning_rate, step

    def step(self) -> float:
        shards = self._sharded.shards
        norm = _clip_shards(shards, self._limit, summed=not self._sharded.replicated)
        self.rule.apply(shards, self._learning_rate, self._step)
        self._sharded.clear_gradients()
        return norm


class BackwardOptimizer:
    """FSDP2: hooks count the gradients of each unit; the last of them applies the unit."""

    def __init__(self, sharded: Sharded, rule: UpdateRule, training: Training) -> None:
        self.rule = rule
        self._sharded = sharded
        self._units: list[list[LocalShard]] = [[] for _ in sharded.units]
        for shard in sharded.shards:
            self._units[shard.unit].append(shard)
        self._limit = unit_limit(training.max_grad_norm, len(self._units))
        self._arrived = [0] * len(self._units)
        self._learning_rate = 0.0
        self._step = 0
        self._is_last = False
        self._squares = 0.0
        for shard in sharded.shards:
            parameter: Any = shard.parameter
            parameter.register_post_accumulate_grad_hook(
                lambda _parameter, unit=shard.unit: self._arrive(unit)
            )

    def before_backward(self, *, learning_rate: float, step: int, part: int, parts: int) -> None:
        self._learning_rate, self._step = learning_rate, step
        self._is_last = part + 1 == parts
        self._arrived = [0] * len(self._units)

    def _arrive(self, unit: int) -> None:
        """Count a gradient. FSDP2 reduces a unit as one buffer: waiting for the last costs nothing."""
        self._arrived[unit] += 1
        if self._is_last and self._arrived[unit] == len(self._units[unit]):
            self._apply(self._units[unit])

    def _apply(self, shards: list[LocalShard]) -> None:
        if self._limit is not None:
            norm = _clip_shards(shards, self._limit, summed=not self._sharded.replicated)
            self._squares += norm**2
        self.rule.apply(shards, self._learning_rate, self._step)
        for shard in shards:
            shard.clear_gradient()

    def step(self) -> float | None:
        for shards in self._units:  # a unit of which some parameter had no gradient
            if any(shard.parameter.grad is not None for shard in shards):
                self._apply(shards)
        norm, self._squares = math.sqrt(self._squares), 0.0
        return norm if self._limit is not None else None


class Fsdp1BackwardOptimizer:
    """FSDP1: calls `_in_backward_optimizers` of each parameter once its unit is reduced.

    That is the contract of torch.distributed.optim._apply_optimizer_in_backward; its own objects
    cannot wait for the last micro-batch, ours can.
    """

    def __init__(self, sharded: Sharded, rule: UpdateRule, training: Training) -> None:
        self.rule = rule
        self._replicated = sharded.replicated
        self._limit = unit_limit(training.max_grad_norm, len(sharded.units))
        self._shards = sharded.shards
        self._learning_rate = 0.0
        self._step = 0
        self._part, self._parts = 0, 1
        self._squares = 0.0
        for shard in sharded.shards:
            if shard.stop > shard.start:
                parameter: Any = shard.parameter
                parameter._in_backward_optimizers = [_ShardOptimizer(self, shard)]
        if self._limit is not None:
            module: Any = sharded.module
            module.register_comm_hook(DefaultState(module.process_group), self._reduce)

    def before_backward(self, *, learning_rate: float, step: int, part: int, parts: int) -> None:
        self._learning_rate, self._step = learning_rate, step
        self._part, self._parts = part, parts

    def _reduce(self, state: DefaultState, gradient: Tensor, output: Tensor | None = None) -> None:
        """Reduce one unit's gradient as FSDP1 would, then clip what this rank keeps of it."""
        if output is None:  # NO_SHARD
            allreduce_hook(state, gradient)
        else:
            reduce_scatter_hook(state, gradient, output)
        assert self._limit is not None
        kept = gradient if output is None else output
        limit = self._limit / self._parts
        norm = clip([kept], limit, device=kept.device, summed=not self._replicated)
        self._squares += norm**2

    def apply(self, shard: LocalShard) -> None:
        """Apply one shard, if this is the last micro-batch of the step."""
        if self._part + 1 == self._parts:
            self.rule.apply([shard], self._learning_rate, self._step)
            shard.clear_gradient()

    def step(self) -> float | None:
        assert all(shard.parameter.grad is None for shard in self._shards)
        norm, self._squares = math.sqrt(self._squares), 0.0
        return norm if self._limit is not None and self._parts == 1 else None


class _ShardOptimizer:
    """The interface that FSDP1 calls: `step` with the gradient set, then `zero_grad`."""

    def __init__(self, owner: Fsdp1BackwardOptimizer, shard: LocalShard) -> None:
        self._owner, self._shard = owner, shard

    def step(self) -> None:
        self._owner.apply(self._shard)

    def zero_grad(self, *, set_to_none: bool) -> None:
        """Keep the gradient: `apply` has freed it, or the last micro-batch still needs it."""


def unit_limit(max_grad_norm: float | None, num_units: int) -> float | None:
    """Return the norm that each unit's gradient may have."""
    return None if max_grad_norm is None else max_grad_norm / math.sqrt(num_units)


def _clip_shards(shards: Sequence[LocalShard], limit: float | None, *, summed: bool) -> float:
    gradients = [g for shard in shards if (g := shard.gradient()) is not None]
    return clip(gradients, limit, device=shards[0].local.device, summed=summed)


@torch.no_grad()
def clip(
    gradients: Sequence[Tensor], limit: float | None, *, device: torch.device, summed: bool
) -> float:
    """Scale gradients down to the norm `limit` and return the norm before, over all ranks.

    `summed` is true where each rank holds a different part. Raises RunFailed where it is not finite.
    """
    squares = torch.zeros((), dtype=torch.float32, device=device)
    for gradient in gradients:
        squares += torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
    if summed:
        dist.all_reduce(squares)
    norm = float(squares.sqrt())
    if not math.isfinite(norm):
        raise RunFailed(
            Reason.NON_FINITE_LOSS,
            f"The gradient is not finite (norm {norm}): lower the learning rate, or raise the "
            "compute or reduce precision.",
        )
    if limit is not None and norm > limit:
        for gradient in gradients:
            gradient.mul_(limit / (norm + 1e-6))  # torch.nn.utils.clip_grad_norm_ adds the same
    return norm
