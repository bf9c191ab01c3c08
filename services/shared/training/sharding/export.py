"""Writing a sharded classifier as a model artifact, one parameter at a time.

Rank 0 gathers each parameter from the shards of all ranks and writes it at once: neither a card nor
the host ever holds more than one whole parameter beyond the shards.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.shared.datasets.text import Text
from services.shared.files.atomic_write import shared_partial_path
from services.shared.jobs.run_directory import RunDirectory, write_json
from services.shared.model.artifact import record_golden, save_golden, write_heads
from services.shared.model.sequence_classification import head_parameter_name
from services.shared.training.process import World
from services.shared.training.sharding.safetensors_ranges import Layout, TensorWriter
from services.shared.training.sharding.shard import DTYPES, LocalShard, Sharded

# save_pretrained's default is 50 GB in transformers 5.24 and was 5 GB before: smaller files are easier
# to copy, to hash in parallel and to resume.
SHARD_BYTES = 5 * 10**9
GOLDEN_TEXTS = 4
_BACKBONE = "backbone."
_HEADS = "heads."


@dataclass
class _WeightFile:
    names: list[str] = field(default_factory=list)
    num_bytes: int = 0


def export_artifact(
    run: RunDirectory,
    sharded: Sharded,
    tokenizer: Any,
    texts: Sequence[Text],
    world: World,
    *,
    max_length: int,
    prefix: str,
) -> Path:
    """Write an artifact's weights, tokenizer and golden texts, on all ranks; return its directory.

    The first of `texts` are recorded with the predictions of the sharded model. The directory is a
    temporary one, until `publish_export` renames it to `run.export`. Raises OSError on rank 0.
    """
    sharded.module.eval()
    golden = record_golden(
        sharded.module, tokenizer, texts[:GOLDEN_TEXTS], max_length=max_length, prefix=prefix
    )
    sharded.reshard()
    partial = shared_partial_path(run.export)
    if world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    export_weights(sharded, partial, world)
    if world.is_first:
        tokenizer.save_pretrained(str(partial))
        save_golden(partial, golden)
    return partial


def publish_export(run: RunDirectory, partial: Path) -> None:
    """Rename a sealed artifact to `run.export`."""
    shutil.rmtree(run.export, ignore_errors=True)
    partial.rename(run.export)


def export_weights(
    sharded: Sharded, directory: Path, world: World, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write config.json, the backbone's weights and the heads to `directory`, on all ranks.

    Weights are stored in the compute type: it is what every forward pass of the training used.
    Raises OSError on rank 0.
    """
    dtype = DTYPES[sharded.recipe.compute]
    owners = _ranges(sharded, world)
    backbone = [p for p in sharded.shards if p.name.startswith(_BACKBONE)]
    files = _divide(backbone, dtype, shard_bytes)
    # An empty tensor in the place of the head of transformers' own classifier: without it
    # AutoModelForSequenceClassification would load the artifact with a random head; so it refuses.
    name = head_parameter_name(sharded.classifier.config) if world.is_first else None
    guard = [] if name is None else [name]
    if world.is_first:
        directory.mkdir(parents=True, exist_ok=True)
        _write_config(sharded.classifier, directory, dtype)
        _write_index(files, directory, guard)
    shards = {shard.name: shard for shard in backbone}
    for number, file in enumerate(files):
        path = directory / _file_name(number, len(files))
        empty = guard if number == 0 else []
        _write_file([shards[name] for name in file.names], path, dtype, owners, world, empty)
    heads = {}
    for shard in sharded.shards:
        if shard.name.startswith(_HEADS):
            whole = gather(shard, dtype, owners[shard.name], world)
            if whole is not None:
                heads[shard.name.removeprefix(_HEADS)] = whole.view(shard.shape)
    if world.is_first:
        write_heads(directory, heads)
    world.barrier()


def gather(
    shard: LocalShard, dtype: torch.dtype, owners: list[tuple[int, int]], world: World
) -> Tensor | None:
    """Return the whole parameter, flat and on the host, on rank 0; None on the others.

    `owners` is the range that each rank holds.
    """
    start, stop = owners[world.rank]
    if not world.is_first:
        if stop > start and owners[0] != (0, shard.num_elements):
            dist.send(shard.local.to(dtype).contiguous(), dst=0)
        return None
    whole = torch.empty(shard.num_elements, dtype=dtype)
    whole[start:stop].copy_(shard.local)
    if stop - start == shard.num_elements:
        return whole
    for rank in range(1, world.size):
        start, stop = owners[rank]
        if stop > start:
            part = torch.empty(stop - start, dtype=dtype, device=shard.local.device)
            dist.recv(part, src=rank)
            whole[start:stop].copy_(part)
    return whole


def _ranges(sharded: Sharded, world: World) -> dict[str, list[tuple[int, int]]]:
    """Return which range of each parameter every rank holds."""
    mine = torch.tensor([[p.start, p.stop] for p in sharded.shards], device=world.device)
    all_ranks = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(all_ranks, mine)
    tables = [ranges.tolist() for ranges in all_ranks]
    return {
        shard.name: [(table[i][0], table[i][1]) for table in tables]
        for i, shard in enumerate(sharded.shards)
    }


def _divide(shards: list[LocalShard], dtype: torch.dtype, shard_bytes: int) -> list[_WeightFile]:
    files = [_WeightFile()]
    for shard in shards:
        size = shard.num_elements * dtype.itemsize
        if files[-1].names and files[-1].num_bytes + size > shard_bytes:
            files.append(_WeightFile())
        files[-1].names.append(shard.name)
        files[-1].num_bytes += size
    return files


def _file_name(number: int, count: int) -> str:
    if count == 1:
        return "model.safetensors"
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _write_file(
    shards: list[LocalShard],
    path: Path,
    dtype: torch.dtype,
    owners: dict[str, list[tuple[int, int]]],
    world: World,
    empty: Sequence[str],
) -> None:
    writer = None
    if world.is_first:
        layout = [Layout(p.name.removeprefix(_BACKBONE), dtype, p.shape) for p in shards]
        layout += [Layout(name, dtype, (0,)) for name in empty]
        writer = TensorWriter(path, layout, {"format": "pt"})
    try:
        for shard in shards:
            whole = gather(shard, dtype, owners[shard.name], world)
            if writer is not None and whole is not None:
                writer.append(whole)
        if writer is not None:
            for _ in empty:
                writer.append(torch.empty(0, dtype=dtype))
            writer.close()
    except BaseException:
        if writer is not None:
            writer.abandon()
            path.unlink(missing_ok=True)
        raise


def _write_config(classifier: Any, directory: Path, dtype: torch.dtype) -> None:
    config = classifier.config
    config.architectures = [type(classifier.backbone).__name__]
    config.dtype = dtype
    config.save_pretrained(str(directory))


def _write_index(files: list[_WeightFile], directory: Path, guard: Sequence[str]) -> None:
    if len(files) == 1:
        return
    weight_map = {
        name.removeprefix(_BACKBONE): _file_name(number, len(files))
        for number, file in enumerate(files)
        for name in file.names
    }
    weight_map |= {name: _file_name(0, len(files)) for name in guard}
    total = sum(file.num_bytes for file in files)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(directory / "model.safetensors.index.json", index)
