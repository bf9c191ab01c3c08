"""The recipes of `spec.Recipe` over pieces: when a gradient is applied, how, and what is kept.

An update rule (`adamw`, `adamw_bf16`, `adafactor`, `sgd`) sees flat local tensors only, so it is the
same under FSDP1 and FSDP2, and its state is cut exactly as the parameters are: a checkpoint of one
number of ranks can be read by another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from services.shared.fsdp.adafactor import Adafactor
from services.shared.fsdp.adamw_bf16 import AdamWBf16
from services.shared.fsdp.process import RunFailed, World
from services.shared.fsdp.shard import Engine, Piece, Sharded
from services.shared.jobs.spec import Recipe, Schedule, Training
from services.shared.jobs.state import Reason


@dataclass
class Group:
    """Pieces updated together, with one weight decay."""

    pieces: list[Piece]
    weight_decay: float


class Rule(Protocol):
    """How gradients become updates. `apply` frees no gradient; it must be called on all ranks."""

    def apply(self, pieces: Sequence[Piece], learning_rate: float, step: int) -> None: ...

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state tensors by piece name, cut like the piece or whole."""
        ...

    def restore(self, name: str, state: dict[str, Tensor]) -> None:
        """Put back the state of one piece; what is whole comes on the host."""

    whole: frozenset[str]  # the keys of state that every rank holds whole


class TorchRule:
    """An optimizer of torch, one instance per piece or for all, on flat local parameters."""

    whole: frozenset[str] = frozenset({"step"})

    def __init__(self, recipe: Recipe, groups: Sequence[Group], *, each: bool) -> None:
        self._fused = recipe.optimizer_impl == "fused"
        self._parameters: dict[str, nn.Parameter] = {}
        self._by_piece: dict[str, torch.optim.Optimizer] = {}
        batches = (
            [Group([piece], group.weight_decay) for group in groups for piece in group.pieces]
            if each
            else [group for group in groups if group.pieces]
        )
        if not each and batches:
            self._add(recipe, batches)
        for batch in batches if each else []:
            self._add(recipe, [batch])

    def _add(self, recipe: Recipe, groups: Sequence[Group]) -> None:
        settings = []
        for group in groups:
            parameters = []
            for piece in group.pieces:
                if piece.local.numel() == 0:
                    continue
                self._parameters[piece.name] = nn.Parameter(piece.local)
                parameters.append(self._parameters[piece.name])
            if parameters:
                settings.append({"params": parameters, "weight_decay": group.weight_decay})
        if not settings:
            return
        optimizer = _torch_optimizer(recipe, settings)
        for group in groups:
            self._by_piece |= {piece.name: optimizer for piece in group.pieces}

    def apply(self, pieces: Sequence[Piece], learning_rate: float, step: int) -> None:
        """Update `pieces` from their gradients; torch counts the steps itself."""
        del step
        chosen: dict[int, torch.optim.Optimizer] = {}
        for piece in pieces:
            parameter = self._parameters.get(piece.name)
            if parameter is None:
                continue
            gradient = piece.gradient()
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
            optimizer = self._by_piece[piece.name]
            chosen[id(optimizer)] = optimizer
        for optimizer in chosen.values():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()
        for piece in pieces:
            if piece.name in self._parameters:
                self._parameters[piece.name].grad = None

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments by piece; `step` is a scalar."""
        return {
            name: dict(self._by_piece[name].state[parameter])
            for name, parameter in self._parameters.items()
            if self._by_piece[name].state.get(parameter)
        }

    def restore(self, name: str, state: dict[str, Tensor]) -> None:
        """Put back the state of one piece."""
        parameter = self._parameters.get(name)
        if parameter is None:
            return
        if self._fused:  # else torch keeps `step` on the host
            state["step"] = state["step"].to(parameter.device)
        self._by_piece[name].state[parameter] = state


def _torch_optimizer(recipe: Recipe, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return torch's optimizer with exactly the implementation asked for, never its default."""
    fused, foreach = recipe.optimizer_impl == "fused", recipe.optimizer_impl == "foreach"
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=0.0, fused=fused, foreach=foreach)
    return torch.optim.AdamW(groups, lr=0.0, fused=fused, foreach=foreach)


class Optimizer:
    """Applies gradients at the end of a step, or unit by unit within the backward pass.

    Clipping. At the end of a step: by the norm over all parameters and ranks, as usual. In the
    backward pass no such norm exists yet when the first gradient is applied, so each unit is clipped
    by its own norm to `max_grad_norm / sqrt(number of units)`: the norm over all units can then never
    exceed `max_grad_norm`.
    """

    def __init__(self, sharded: Sharded, rule: Rule, world: World, training: Training) -> None:
        self.rule = rule
        self.in_backward = sharded.recipe.optimizer_in_backward
        self._sharded = sharded
        self._world = world
        self._max_norm = training.max_grad_norm
        self._learning_rate = 0.0
        self._step = 0
        self._armed = False
        self._arrived: list[int] = [0] * len(sharded.units)
        self._members = [
            [piece for piece in sharded.pieces if piece.unit == i]
            for i in range(len(sharded.units))
        ]
        self._squares = 0.0
        if self.in_backward:
            self._attach()

    def before_backward(self, *, learning_rate: float, step: int, last: bool) -> None:
        """Say what the coming backward pass belongs to; only the last one of a step is applied."""
        self._learning_rate, self._step, self._armed = learning_rate, step, last
        self._arrived = [0] * len(self._members)

    def step(self) -> float:
        """Apply what has not been applied, free all gradients, return the norm before clipping."""
        if not self.in_backward:
            norm = self._clip(self._sharded.pieces, self._max_norm)
            self.rule.apply(self._sharded.pieces, self._learning_rate, self._step)
            for piece in self._sharded.pieces:
                piece.clear_gradient()
            return norm
        for members in self._members:  # a unit of which some parameter had no gradient
            if any(piece.parameter.grad is not None for piece in members):
                self._apply(members)
        norm, self._squares = math.sqrt(self._squares), 0.0
        return norm

    def _attach(self) -> None:
        if self._sharded.engine is not Engine.FSDP2:
            raise RunFailed(Reason.BAD_SPEC, "optimizer in backward: not on FSDP1 yet")
        for unit, members in enumerate(self._members):
            for piece in members:
                parameter: Any = piece.parameter
                parameter.register_post_accumulate_grad_hook(
                    lambda _parameter, unit=unit: self._arrive(unit)
                )

    def _arrive(self, unit: int) -> None:
        """Count a unit's gradients; with the last of them the unit is whole and is applied.

        FSDP2 reduces a unit as one buffer, so waiting for the last costs no memory.
        """
        if not self._armed:
            return
        self._arrived[unit] += 1
        if self._arrived[unit] == len(self._members[unit]):
            self._apply(self._members[unit])

    def _apply(self, members: list[Piece]) -> None:
        limit = self._max_norm / math.sqrt(len(self._members)) if self._max_norm else None
        if limit is not None:
            self._squares += self._clip(members, limit) ** 2
        self.rule.apply(members, self._learning_rate, self._step)
        for piece in members:
            piece.clear_gradient()

    @torch.no_grad()
    def _clip(self, pieces: Sequence[Piece], limit: float | None) -> float:
        """Scale gradients down to `limit` and return their norm over all ranks before that."""
        gradients = [g for piece in pieces if (g := piece.gradient()) is not None]
        squares = torch.zeros((), dtype=torch.float32, device=self._world.device)
        for gradient in gradients:
            squares += torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        if not self._sharded.replicated:
            dist.all_reduce(squares)
        norm = float(squares.sqrt())
        if limit is not None and norm > limit and math.isfinite(norm):
            for gradient in gradients:
                gradient.mul_(limit / (norm + 1e-6))
        return norm


def build_optimizer(sharded: Sharded, training: Training, world: World) -> Optimizer:
    """Return the optimizer of a recipe. Raises RunFailed(BAD_SPEC) for one that cannot run here."""
    recipe = sharded.recipe
    groups = decay_groups(sharded.pieces, training.weight_decay)
    rule: Rule
    if recipe.optimizer in ("adamw", "sgd"):
        rule = TorchRule(recipe, groups, each=recipe.optimizer_in_backward)
    elif recipe.optimizer == "adamw_bf16":
        # Replicas must round alike.
        dice_rank = 0 if sharded.replicated else world.rank
        rule = AdamWBf16(groups, seed=training.seed, rank=dice_rank)
    elif recipe.optimizer == "adafactor":
        rule = Adafactor(groups, replicated=sharded.replicated, seed=training.seed, rank=world.rank)
    else:
        raise RunFailed(
            Reason.BAD_SPEC,
            "recipe.optimizer adamw_8bit needs torchao, which is not installed here; "
            "adamw_bf16 takes about as little memory",
        )
    return Optimizer(sharded, rule, world, training)


def decay_groups(pieces: Sequence[Piece], weight_decay: float) -> list[Group]:
    """Return matrices with weight decay; norms and biases (one dimension) without."""
    return [
        Group([piece for piece in pieces if len(piece.shape) > 1], weight_decay),
        Group([piece for piece in pieces if len(piece.shape) <= 1], 0.0),
    ]


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
