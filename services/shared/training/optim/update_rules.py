"""How gradients become updates, for each optimizer of `spec.Recipe`, over shards.

A rule sees flat local tensors only, so it is the same under FSDP1 and FSDP2, and its state is cut
exactly as the parameters are: a checkpoint of one number of ranks can be read by another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from services.shared.jobs.spec import Recipe, Training
from services.shared.jobs.state import Reason
from services.shared.training.optim.adafactor import Adafactor
from services.shared.training.optim.adamw_8bit import AdamW8Bit
from services.shared.training.optim.adamw_bf16 import AdamWBf16
from services.shared.training.optim.adamw_split import AdamWSplit
from services.shared.training.optim.parameter_groups import ParameterGroup, decay_groups
from services.shared.training.process import RunFailed
from services.shared.training.sharding.shard import LocalShard, Sharded


class UpdateRule(Protocol):
    """How gradients become updates."""

    whole: frozenset[str]  # the keys of state that every rank holds whole
    blocks: Mapping[str, int]  # keys with one value for so many elements of a shard

    def apply(self, shards: Sequence[LocalShard], learning_rate: float, step: int) -> None:
        """Update `shards` from their gradients, on all ranks alike; `step` counts from 0."""
        ...

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the state tensors by shard name, cut like the shard or whole."""
        ...

    def restore(self, name: str, state: dict[str, Tensor]) -> None:
        """Restore the state of one shard; keys in `whole` arrive on the host.

        Keys in `blocks` arrive expanded to one value per element: block bounds may differ.
        """


def build_rule(sharded: Sharded, training: Training, *, rank: int) -> UpdateRule:
    """Return the rule of a recipe. Raises RunFailed(BAD_SPEC) for one that cannot run here."""
    recipe = sharded.recipe
    groups = decay_groups(sharded.shards, training.weight_decay)
    if recipe.offload == "optimizer" and recipe.optimizer != "adamw":
        raise RunFailed(
            Reason.BAD_SPEC, "recipe.offload optimizer is for adamw: other rules keep little"
        )
    if recipe.optimizer in ("adamw", "sgd"):
        return TorchRule(recipe, groups)
    if recipe.optimizer == "adafactor":
        return Adafactor(groups, replicated=sharded.replicated, seed=training.seed, rank=rank)
    rank = 0 if sharded.replicated else rank  # replicas must round alike
    if recipe.optimizer in ("adamw_split", "adamw_split24"):
        bits = 32 if recipe.optimizer == "adamw_split" else 24
        return AdamWSplit(groups, seed=training.seed, rank=rank, master_bits=bits)
    rule = AdamWBf16 if recipe.optimizer == "adamw_bf16" else AdamW8Bit
    return rule(groups, seed=training.seed, rank=rank)


class TorchRule:
    """AdamW or SGD of torch: one instance for all shards, or one each where they are applied separately.

    SGD decays weights in place first: without momentum that is the same update, and torch's foreach
    would hold a second copy of every gradient for it.

    With `offload = "optimizer"` the moments stay on the host: gradient and parameter go there one
    shard at a time, and the updated parameter comes back.
    """

    whole: frozenset[str] = frozenset({"step"})
    blocks: Mapping[str, int] = MappingProxyType({})

    def __init__(self, recipe: Recipe, groups: Sequence[ParameterGroup]) -> None:
        self._fused = recipe.optimizer_impl == "fused"
        self._on_host = recipe.offload == "optimizer"
        self._parameters: dict[str, nn.Parameter] = {}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        held = [
            ParameterGroup([p for p in g.shards if p.local.numel()], g.weight_decay) for g in groups
        ]
        if recipe.optimizer_in_backward or self._on_host:
            for group in held:
                for shard in group.shards:
                    self._add(recipe, [ParameterGroup([shard], group.weight_decay)])
        elif any(group.shards for group in held):
            self._add(recipe, held)

    def _add(self, recipe: Recipe, groups: Sequence[ParameterGroup]) -> None:
        shards = [shard for group in groups for shard in group.shards]
        for shard in shards:
            local = shard.local
            self._parameters[shard.name] = nn.Parameter(
                torch.empty(0, dtype=local.dtype) if self._on_host else local
            )
        optimizer = _torch_optimizer(
            recipe,
            [
                {
                    "params": [self._parameters[shard.name] for shard in group.shards],
                    "weight_decay": group.weight_decay,
                }
                for group in groups
                if group.shards
            ],
        )
        self._optimizers |= {shard.name: optimizer for shard in shards}

    def apply(self, shards: Sequence[LocalShard], learning_rate: float, step: int) -> None:
        """Update `shards` from their gradients; torch counts the steps itself."""
        del step
        held = [shard for shard in shards if shard.name in self._parameters]
        chosen = {id(self._optimizers[p.name]): self._optimizers[p.name] for p in held}
        for optimizer in chosen.values():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        if self._on_host:
            for shard in held:
                self._apply_on_host(shard)
            return
        for shard in held:
            self._parameters[shard.name].grad = shard.gradient()
        for optimizer in chosen.values():
            _decay(optimizer)
            optimizer.step()
        for shard in held:
            self._parameters[shard.name].grad = None

    def _apply_on_host(self, shard: LocalShard) -> None:
        gradient, parameter = shard.gradient(), self._parameters[shard.name]
        if gradient is None:
            return
        parameter.data = shard.local.cpu()
        parameter.grad = gradient.cpu()
        self._optimizers[shard.name].step()
        with torch.no_grad():
            shard.local.copy_(parameter)
        parameter.grad = None
        parameter.data = torch.empty(0, dtype=parameter.dtype)

    def state(self) -> dict[str, dict[str, Tensor]]:
        """Return the moments by shard; `step` is a scalar."""
        return {
            name: dict(self._optimizers[name].state[parameter])
            for name, parameter in self._parameters.items()
            if self._optimizers[name].state.get(parameter)
        }

    def restore(self, name: str, state: dict[str, Tensor]) -> None:
        """Restore the state of one shard."""
        parameter = self._parameters.get(name)
        if parameter is None:
            return
        if self._on_host:
            state = {key: value.cpu() for key, value in state.items()}
        elif self._fused:  # else torch keeps `step` on the host
            state["step"] = state["step"].to(parameter.device)
        self._optimizers[name].state[parameter] = state


@torch.no_grad()
def _decay(optimizer: torch.optim.Optimizer) -> None:
    """Apply SGD's weight decay to the parameters that are about to be updated."""
    for group in optimizer.param_groups:
        if "decay_in_place" in group:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["decay_in_place"])


def _torch_optimizer(recipe: Recipe, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return torch's optimizer with exactly the implementation of the recipe, never its default."""
    fused, foreach = recipe.optimizer_impl == "fused", recipe.optimizer_impl == "foreach"
    if recipe.optimizer == "sgd":
        undecayed = [group | {"decay_in_place": group.pop("weight_decay")} for group in groups]
        return torch.optim.SGD(undecayed, lr=0.0, fused=fused, foreach=foreach)
    return torch.optim.AdamW(groups, lr=0.0, fused=fused, foreach=foreach)
