"""Checks of the optimizers on two ranks; `test_optimizer.py` asserts what they return."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from services.shared.training.optim.optimizer import Optimizer, build_optimizer
from services.shared.training.process import World
from services.shared.training.sharding.shard import (
    Sharded,
)
from tests.training.rank_checks import check
from tests.training.rank_training import (
    ENGINES,
    failure,
    furthest,
    loss_of,
    made,
    plain,
    plain_training,
    recipe,
    same,
    train,
    training,
    whole,
)


@check
def rules_follow_plain_optimizers(world: World, directory: Path) -> Any:
    found = {}
    cases: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
        "adamw fused": (
            {"optimizer_impl": "fused"},
            lambda g: torch.optim.AdamW(g, lr=1e-2, fused=True),
        ),
        "adamw foreach": (
            {"optimizer_impl": "foreach"},
            lambda g: torch.optim.AdamW(g, lr=1e-2, foreach=True),
        ),
        "adamw on host": (
            {"offload": "optimizer"},
            lambda g: torch.optim.AdamW(g, lr=1e-2),
        ),
        "sgd": ({"optimizer": "sgd"}, lambda g: torch.optim.SGD(g, lr=1e-2)),
        "adafactor": ({"optimizer": "adafactor"}, lambda g: torch.optim.Adafactor(g, lr=1e-2)),
    }
    for name, (changes, make) in cases.items():
        for engine in ENGINES:
            sharded = made(world, recipe(**changes), engine)
            first = whole(sharded)
            optimizer = build_optimizer(sharded, training(), world)
            losses = train(sharded, optimizer, world, steps=range(4))
            expected, weights = plain_training(first, make, range(4))
            found[f"{engine} {name}"] = {
                "loss": max(abs(x - y) for x, y in zip(losses, expected, strict=True)),
                "weights": furthest(whole(sharded), weights),
                "moved": furthest(first, weights),
            }
    return found


@check
def small_state_learns_like_fp32(world: World, directory: Path) -> Any:
    found = {}
    for name in ("adamw", "adamw_bf16", "adamw_8bit", "adamw_split", "adamw_split24"):
        for engine in ENGINES:
            sharded = made(world, recipe(optimizer=name), engine)
            optimizer = build_optimizer(sharded, training(), world)
            losses = train(sharded, optimizer, world, steps=range(12))
            state = [t for s in optimizer.rule.state().values() for t in s.values() if t.ndim]
            found[f"{engine} {name}"] = {
                "losses": losses,
                "parameters": sorted({str(p.local.dtype) for p in sharded.shards}),
                "state": sorted({str(t.dtype) for t in state}),
                "state_bytes": sum(t.nbytes for t in state),
                "elements": sum(p.stop - p.start for p in sharded.shards),
            }
    return found


@check
def backward_is_bit_equal(world: World, directory: Path) -> Any:
    """AdamW applied within the backward pass against AdamW at the end of the step."""
    found = {}
    for engine in ENGINES:
        for sharding in ("full", "none"):
            for parts in (1, 2):
                results, gradients = [], 0
                for in_backward in (False, True):
                    chosen = recipe(
                        sharding=sharding,
                        optimizer_in_backward=in_backward,
                        optimizer_impl="fused",
                    )
                    sharded = made(world, chosen, engine)
                    optimizer = build_optimizer(sharded, training(), world)
                    losses = train(sharded, optimizer, world, steps=range(2), parts=parts)
                    if in_backward:
                        gradients = gradients_after_backward(sharded, optimizer, world)
                    else:
                        train(sharded, optimizer, world, steps=range(2, 3))
                    results.append((losses, whole(sharded)))
                (one, first), (other, second) = results
                found[f"{engine} {sharding} {parts}"] = {
                    "losses_equal": one == other,
                    "weights_equal": same(first, second),
                    "gradients_left": gradients,
                }
    return found


def gradients_after_backward(sharded: Sharded, optimizer: Optimizer, world: World) -> int:
    """Take a third step and count what is left before `step` is called."""
    loss = loss_of(sharded.module, 2, slice(world.rank, None, world.size))
    optimizer.before_backward(learning_rate=1e-2, step=2, part=0, parts=1)
    torch.autograd.backward(loss * world.size)
    left = sum(shard.parameter.grad is not None for shard in sharded.shards)
    optimizer.step()
    return left


@check
def clipping(world: World, directory: Path) -> Any:
    """The norm of one SGD update with rate 1 and no decay is that of the clipped gradient."""
    found = {}
    for engine in ENGINES:
        for in_backward in (False, True):
            for parts in (1, 2):
                chosen = recipe(optimizer="sgd", optimizer_in_backward=in_backward)
                sharded = made(world, chosen, engine)
                before = whole(sharded)
                limits = training(max_grad_norm=0.05, weight_decay=0)
                optimizer = build_optimizer(sharded, limits, world)
                for part in range(parts):
                    rows = slice(world.rank * parts + part, None, world.size * parts)
                    loss = loss_of(sharded.module, 0, rows)
                    optimizer.before_backward(learning_rate=1.0, step=0, part=part, parts=parts)
                    torch.autograd.backward(loss * world.size)
                norm = optimizer.step()
                after = whole(sharded)
                update = sum(float((after[n] - before[n]).square().sum()) for n in after)
                found[f"{engine} {in_backward} {parts}"] = {
                    "norm": norm,
                    "update": math.sqrt(update),
                }
    reference = plain(before)
    torch.autograd.backward(loss_of(reference, 0, slice(None)))
    squares = sum(float(p.grad.square().sum()) for p in reference.parameters())
    return {"cases": found, "true_norm": math.sqrt(squares)}


@check
def infinite_gradient_stops(world: World, directory: Path) -> Any:
    found = {}
    for in_backward in (False, True):
        chosen = recipe(optimizer_in_backward=in_backward)
        sharded = made(world, chosen)
        optimizer = build_optimizer(sharded, training(max_grad_norm=1.0), world)
        before = whole(sharded)

        def step(sharded: Sharded = sharded, optimizer: Optimizer = optimizer) -> None:
            loss = loss_of(sharded.module, 0, slice(None)) * float("inf")
            optimizer.before_backward(learning_rate=1e-2, step=0, part=0, parts=1)
            torch.autograd.backward(loss)
            optimizer.step()

        found[str(in_backward)] = failure(step) | {"untouched": same(before, whole(sharded))}
    return found
