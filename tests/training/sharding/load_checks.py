"""Checks of loading on two ranks; `test_load.py` asserts what they return."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.shared.model.classifier import build_classifier
from services.shared.training import memory_probe
from services.shared.training.process import World
from services.shared.training.sharding import load
from services.shared.training.sharding.load import load_pretrained
from tests.training.rank_checks import check
from tests.training.rank_training import (
    ENGINES,
    HEADS,
    HERE,
    empty,
    failure,
    made,
    model_config,
    recipe,
    same,
    whole,
)


@check
def first_weights(world: World, directory: Path) -> Any:
    """The same from one seed for every engine and cut, and as the architecture draws them."""
    all_of = {
        f"{engine} {sharding}": whole(made(world, recipe(sharding=sharding), engine))
        for engine in ENGINES
        for sharding in ("full", "none")
    }
    one = all_of[f"{HERE} full"]
    other_seed = whole(made(world, recipe(), seed=1))
    layer = one["backbone.layers.0.mlp.up_proj.weight"]
    return {
        "equal": all(same(one, other) for other in all_of.values()),
        "differs_by_seed": not same(one, other_seed),
        "layers_differ": not torch.equal(layer, one["backbone.layers.1.mlp.up_proj.weight"]),
        "std": float(layer.std()),
        "norms": float(one["backbone.norm.weight"].min()),
        "padding_row": float(one["backbone.embed_tokens.weight"][0].abs().max()),
    }


def write_checkpoint(directory: Path, *, files: int = 1, prefix: str = "", seed: int = 3) -> Any:
    """Write an ordinary Hugging Face directory and return its model."""
    torch.manual_seed(seed)
    backbone = build_classifier(model_config(), HEADS).backbone
    size = sum(p.numel() for p in backbone.parameters()) * 4
    shards = size if files == 1 else int(size / files * 1.05)
    if dist.get_rank() == 0:
        backbone.save_pretrained(str(directory), max_shard_size=shards)
    dist.barrier()
    return backbone


@check
def pretrained_weights(world: World, directory: Path) -> Any:
    backbone = write_checkpoint(directory / "four", files=4)
    found = {"files": len(list((directory / "four").glob("*.safetensors")))}
    expected = {f"backbone.{n}": p.detach() for n, p in backbone.named_parameters()}
    for engine in ENGINES:
        sharded = empty(world, recipe(), engine)
        load_pretrained(sharded, directory / "four", seed=0)
        loaded = {n: v for n, v in whole(sharded).items() if n.startswith("backbone.")}
        found[str(engine)] = same(expected, loaded)
    bf16 = empty(world, recipe(optimizer="adamw_bf16"), HERE)
    load_pretrained(bf16, directory / "four", seed=0)
    rounded = {n: v.bfloat16().float() for n, v in expected.items()}
    loaded = {n: v for n, v in whole(bf16).items() if n.startswith("backbone.")}
    found["bf16"] = same(rounded, loaded)
    return found


@check
def host_memory_of_loading(world: World, directory: Path) -> Any:
    """Resident bytes at the highest while loading four files, beyond the rank's own parameters."""
    fields = {"hidden_size": 768, "intermediate_size": 6144, "num_hidden_layers": 4}
    if world.is_first:
        torch.manual_seed(0)
        backbone = build_classifier(model_config(**fields), HEADS).backbone
        size = sum(p.numel() for p in backbone.parameters()) * 4
        backbone.save_pretrained(str(directory), max_shard_size=size * 10 // 35)
        del backbone
    world.barrier()
    sharded = empty(world, recipe(), HERE, **fields)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew (man 5 proc)
    before = _status("VmRSS")
    load_pretrained(sharded, directory, seed=0)
    return {
        "files": len(list(directory.glob("*.safetensors"))),
        "beyond": _status("VmHWM")
        - before
        - memory_probe.storage_bytes(shard.local for shard in sharded.shards),
        "unit": max(unit.num_elements for unit in sharded.units) * 4,
        "whole": sharded.num_parameters * 4,
    }


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


@check
def weights_that_are_refused(world: World, directory: Path) -> Any:
    write_checkpoint(directory / "good")
    for name in ("pickled", "none", "cut", "other"):
        if world.is_first:
            (directory / name).mkdir()
    if world.is_first:
        (directory / "pickled" / "pytorch_model.bin").write_bytes(b"never read")
        good = (directory / "good" / "model.safetensors").read_bytes()
        (directory / "cut" / "model.safetensors").write_bytes(good[: len(good) // 2])
    world.barrier()
    found = {}
    for name in ("pickled", "none", "cut"):
        sharded = empty(world, recipe(), HERE)
        found[name] = failure(partial(load_pretrained, sharded, directory / name, seed=0))
    wider = empty(world, recipe(), HERE, intermediate_size=63)
    found["shape"] = failure(lambda: load_pretrained(wider, directory / "good", seed=0))
    deeper = empty(world, recipe(), HERE, num_hidden_layers=3)
    found["missing"] = failure(lambda: load_pretrained(deeper, directory / "good", seed=0))
    return found


@check
def unfilled_parameter_is_found(world: World, directory: Path) -> Any:
    """The loader skips one parameter, as ZeRO's persistent parameters once were."""
    write_checkpoint(directory / "good")
    true_put = load._put

    def put(shard: Any, values: Tensor, at: int, sums: Any) -> None:
        if shard.name.endswith("embed_tokens.weight"):
            sums.add(shard.name, values, at=at)
            return
        true_put(shard, values, at, sums)

    sharded = empty(world, recipe(), HERE)
    for shard in sharded.shards:
        shard.local.fill_(7.0)
    load._put = put
    try:
        return failure(lambda: load_pretrained(sharded, directory / "good", seed=0))
    finally:
        load._put = true_put
