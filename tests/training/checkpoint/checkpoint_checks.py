"""Checks of checkpoints on two ranks; `test_checkpoint.py` asserts what they return."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from services.shared.memory.recipe import Engine
from services.shared.training.checkpoint import checkpoint
from services.shared.training.optim.optimizer import build_optimizer
from services.shared.training.process import World
from services.shared.training.sharding.safetensors_ranges import TensorWriter
from tests.training.rank_checks import check
from tests.training.rank_training import (
    ENGINES,
    HERE,
    empty,
    failure,
    made,
    recipe,
    same,
    train,
    training,
    whole,
)

RECIPES: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer_impl": "fused"},
    "adamw_bf16": {"optimizer": "adamw_bf16"},
    "adamw_8bit": {"optimizer": "adamw_8bit"},
    "adamw_split": {"optimizer": "adamw_split", "optimizer_in_backward": True},
    "adamw_split24": {"optimizer": "adamw_split24"},
    "adafactor": {"optimizer": "adafactor"},
    "in backward": {"optimizer_in_backward": True},
}


@check
def checkpoints(world: World, directory: Path) -> Any:
    """Save after two steps, go on for two; restore elsewhere, go on: the same to the bit."""
    found = {}
    for engine in ENGINES:
        for name, changes in RECIPES.items():
            if engine is Engine.FSDP1 and name == "in backward":
                changes = changes | {"sharding": "grad_op"}
            sharded = made(world, recipe(**changes), engine)
            optimizer = build_optimizer(sharded, training(), world)
            train(sharded, optimizer, world, steps=range(1))
            place = directory / f"{engine} {name}"
            path = checkpoint.save(
                place, sharded, optimizer, world, job_id="j", step=1, loop={"x": 1}
            )
            losses = train(sharded, optimizer, world, steps=range(1, 3))
            again = made(world, recipe(**changes), engine, seed=9)
            second = build_optimizer(again, training(), world)
            saved = checkpoint.restore(path, again, second)
            relosses = train(again, second, world, steps=range(1, 3))
            found[f"{engine} {name}"] = {
                "losses_equal": losses == relosses,
                "weights_equal": same(whole(sharded), whole(again)),
                "loop": saved.loop,
                "pickles": [p.name for p in place.rglob("*") if p.suffix in (".pt", ".metadata")],
            }
    return found


@check
def checkpoints_change_hands(world: World, directory: Path) -> Any:
    """What two ranks saved in halves, replicas and the other engine read whole."""
    found = {}
    for name in ("adamw", "adamw_8bit", "adamw_split"):
        sharded = made(world, recipe(optimizer=name))
        optimizer = build_optimizer(sharded, training(), world)
        train(sharded, optimizer, world, steps=range(2))
        place = directory / name
        path = checkpoint.save(place, sharded, optimizer, world, job_id="j", step=2, loop={})
        expected = train(sharded, optimizer, world, steps=range(2, 4))
        for engine, sharding in ((HERE, "none"), (Engine.FSDP1, "full")):
            other = made(world, recipe(optimizer=name, sharding=sharding), engine, seed=9)
            second = build_optimizer(other, training(), world)
            checkpoint.restore(path, other, second)
            losses = train(other, second, world, steps=range(2, 4))
            apart = max(abs(x - y) for x, y in zip(losses, expected, strict=True))
            found[f"{name} {sharding}"] = apart
    return found


@check
def damaged_checkpoints(world: World, directory: Path) -> Any:
    sharded = made(world, recipe())
    optimizer = build_optimizer(sharded, training(), world)
    train(sharded, optimizer, world, steps=range(1))
    found: dict[str, Any] = {}
    for name in ("bits", "short", "missing"):
        path = checkpoint.save(
            directory / name, sharded, optimizer, world, job_id="j", step=1, loop={}
        )
        file = path / "rank-00001.safetensors"
        if world.is_first and name == "bits":
            data = bytearray(file.read_bytes())
            data[-5] ^= 1
            file.write_bytes(data)
        if world.is_first and name == "short":
            file.write_bytes(file.read_bytes()[:-8])
        if world.is_first and name == "missing":
            file.unlink()
        world.barrier()
        found[name] = failure(partial(checkpoint.restore, path, sharded, optimizer))
    path = checkpoint.save(directory / "o", sharded, optimizer, world, job_id="j", step=1, loop={})
    sgd = made(world, recipe(optimizer="sgd"))
    second = build_optimizer(sgd, training(), world)
    found["optimizer"] = failure(lambda: checkpoint.restore(path, sgd, second))
    wider = empty(world, recipe(), HERE, intermediate_size=63)
    found["model"] = failure(lambda: checkpoint.restore(path, wider, None))
    return found


@check
def crash_while_saving(world: World, directory: Path) -> Any:
    """Rank 1's disk is full in the middle of its file: the last good checkpoint must stay."""
    sharded = made(world, recipe())
    checkpoint.save(directory, sharded, None, world, job_id="j", step=1, loop={})

    class FullDisk(TensorWriter):
        def append(self, values: Tensor) -> None:
            if world.rank == 1 and len(self._remaining) < 10:
                raise OSError(28, "No space left on device")
            super().append(values)

    error = ""
    with patch.object(checkpoint, "TensorWriter", FullDisk):
        try:
            checkpoint._write_rank(directory, sharded, None, world.rank)
        except OSError as fault:
            error = str(fault)
    left = [p.name for p in directory.glob("rank-*")]
    world.barrier()
    latest = checkpoint.latest(directory)
    assert latest is not None
    checkpoint.restore(latest, sharded, None)
    return {
        "errors": world.sum([float("No space" in error)]),
        "latest": latest.name,
        "left": sorted(left),
    }


@check
def retention(world: World, directory: Path) -> Any:
    sharded = made(world, recipe())
    for step in (1, 2, 10, 11):
        checkpoint.save(directory, sharded, None, world, job_id="j", step=step, loop={})
        checkpoint.retain(directory, 2, world)
    world.barrier()
    return sorted(path.name for path in directory.iterdir())
