"""Checks of the memory probe on two ranks; `test_memory_probe.py` asserts what they return."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.shared.jobs.run_directory import MemoryRecord, RunDirectory, read_records
from services.shared.memory.recipe import Engine
from services.shared.training.memory_probe import MemoryProbe
from services.shared.training.process import Position, World
from services.shared.training.sharding import shard as shard_module
from tests.training.rank_checks import check
from tests.training.rank_training import (
    HERE,
    failure,
    made,
    recipe,
)


@check
def unsharded_model_is_stopped(world: World, directory: Path) -> Any:
    """Sharding is requested, but the call does nothing."""
    name = "_fsdp2" if HERE is Engine.FSDP2 else "_fsdp1"
    true_wrap = getattr(shard_module, name)
    true_find = shard_module._local_shards_fsdp1

    def do_nothing(classifier: Any, *_: Any) -> Any:
        return classifier.to_empty(device="cpu")

    setattr(shard_module, name, do_nothing)
    setattr(shard_module, "_local_shards_fsdp1", shard_module._local_shards_fsdp2)  # noqa: B010
    try:
        sharded = made(world, recipe())
    finally:
        setattr(shard_module, name, true_wrap)
        shard_module._local_shards_fsdp1 = true_find
    run = RunDirectory(directory)
    probe = MemoryProbe(run, world, Position())
    found = failure(lambda: probe.check_sharding(sharded))
    world.barrier()
    records = [r for _, r in read_records(run.memory_file(0), MemoryRecord)]
    return found | {"observed": records[0].observed}


@check
def one_coarse_rank_stops_all(world: World, directory: Path) -> Any:
    """Rank 1 has wrapped the root only: rank 0 must stop too, though it did as planned."""
    sharded = made(world, recipe())
    if world.rank == 1:
        sharded.units.append(sharded.units[0])  # it believes in one unit more than there is
    probe = MemoryProbe(RunDirectory(directory), world, Position())
    return failure(lambda: probe.check_sharding(sharded))
