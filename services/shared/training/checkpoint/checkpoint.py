"""Checkpoints: one safetensors file of local shards per rank; complete or ignored.

    checkpoints/step-00000120/rank-00000.safetensors   this rank's ranges of parameters and moments
    checkpoints/step-00000120/rank-00000.json          which ranges they are, size and crc32
    checkpoints/step-00000120/COMPLETE                 CheckpointManifest: written last, by rank 0

Why not torch.distributed.checkpoint: its index is a pickle, and on torch 2.5 its reader unpickles
more than that. Ranges make a checkpoint readable by any number of ranks: a rank reads from each file
what overlaps its own shards. A checkpoint is written to a temporary directory and renamed; only then are
older ones removed, so a crash or a full disk while saving leaves the last good one untouched.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor

from services.shared.files.atomic_write import shared_partial_path, sync
from services.shared.files.sealed_json import seal, unseal
from services.shared.jobs.run_directory import write_json
from services.shared.jobs.state import Reason
from services.shared.training.optim.optimizer import Optimizer
from services.shared.training.optim.update_rules import UpdateRule
from services.shared.training.process import RunFailed, World
from services.shared.training.sharding.safetensors_ranges import (
    Layout,
    TensorFile,
    TensorWriter,
)
from services.shared.training.sharding.shard import LocalShard, Sharded

COMPLETE = "COMPLETE"
MODEL = "model"
_READ_BYTES = 8 * 2**20


class CheckpointManifest(BaseModel):
    """The content of COMPLETE."""

    format: int = 2  # 1: without a checksum
    job_id: str
    step: int
    ranks: int
    parameters: dict[str, list[int]]  # name -> shape
    optimizer: str | None  # none: weights only
    loop: dict[str, Any]  # the state of the training loop


class _RankRecord(BaseModel):
    ranges: dict[str, tuple[int, int]]  # parameter -> [start, stop)
    num_bytes: int
    crc32: int


def save(
    directory: Path,
    sharded: Sharded,
    optimizer: Optimizer | None,
    world: World,
    *,
    job_id: str,
    step: int,
    loop: Mapping[str, Any],
    name: str | None = None,
) -> Path:
    """Write one checkpoint, on all ranks, and return its path. Raises OSError on any rank."""
    final = directory / (name or f"step-{step:08d}")
    partial = shared_partial_path(final)
    if world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    if world.is_first or not sharded.replicated:
        _write_rank(partial, sharded, optimizer, world.rank)
    world.barrier()
    if world.is_first:
        saved = CheckpointManifest(
            job_id=job_id,
            step=step,
            ranks=1 if sharded.replicated else world.size,
            parameters={shard.name: list(shard.shape) for shard in sharded.shards},
            optimizer=sharded.recipe.optimizer if optimizer is not None else None,
            loop=dict(loop),
        )
        write_json(partial / COMPLETE, seal(json.loads(saved.model_dump_json())))
        sync(partial)
        _replace(partial, final)
        sync(directory)
    world.barrier()
    return final


def _replace(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`, replacing an existing checkpoint of that name."""
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        partial.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        partial.rename(final)


def retain(directory: Path, count: int, world: World) -> None:
    """Remove all but the `count` latest checkpoints."""
    if world.is_first:
        for old in complete_checkpoints(directory)[:-count]:
            shutil.rmtree(old, ignore_errors=True)


def complete_checkpoints(directory: Path) -> list[Path]:
    """Return the complete checkpoints by step, oldest first."""
    return sorted(path.parent for path in directory.glob(f"step-*/{COMPLETE}"))


def latest(*directories: Path | None) -> Path | None:
    """Return the complete checkpoint with the highest step in any of the directories."""
    found = [path for d in directories if d is not None for path in complete_checkpoints(d)]
    return max(found, key=lambda path: path.name, default=None)


def read_manifest(path: Path) -> CheckpointManifest:
    """Return the manifest of a checkpoint. Raises RunFailed(BAD_CHECKPOINT)."""
    try:
        return CheckpointManifest.model_validate(unseal((path / COMPLETE).read_bytes()))
    except (OSError, ValueError) as error:
        raise RunFailed(Reason.BAD_CHECKPOINT, f"{path} is not a checkpoint: {error}") from error


def restore(path: Path, sharded: Sharded, optimizer: Optimizer | None) -> CheckpointManifest:
    """Fill the model, and the optimizer where one is given, from a checkpoint of any rank count.

    Raises RunFailed(BAD_CHECKPOINT) for one of another model or optimizer, or damaged.
    """
    saved = read_manifest(path)
    ours = {shard.name: list(shard.shape) for shard in sharded.shards}
    if saved.parameters != ours:
        different = sorted(
            name
            for name in saved.parameters.keys() | ours.keys()
            if saved.parameters.get(name) != ours.get(name)
        )
        raise RunFailed(
            Reason.BAD_CHECKPOINT, f"{path} is of another model: {', '.join(different[:5])} differ"
        )
    if optimizer is not None and saved.optimizer != sharded.recipe.optimizer:
        raise RunFailed(
            Reason.BAD_CHECKPOINT,
            f"{path} was saved with optimizer {saved.optimizer}, the job uses "
            f"{sharded.recipe.optimizer}",
        )
    try:
        with ExitStack() as stack:
            files = [_open_rank(path, rank, stack) for rank in range(saved.ranks)]
            for shard in sharded.shards:
                _fill(shard, MODEL, shard.local, files)
                if optimizer is not None:
                    state = _state(shard, files, optimizer.rule)
                    if state:
                        optimizer.rule.restore(shard.name, state)
    except (ValueError, OSError, KeyError) as error:
        raise RunFailed(Reason.BAD_CHECKPOINT, f"{path}: {error}") from error
    return saved


def _write_rank(directory: Path, sharded: Sharded, optimizer: Optimizer | None, rank: int) -> None:
    tensors = dict(_tensors(sharded, optimizer))
    layout = [Layout(key, value.dtype, tuple(value.shape)) for key, value in tensors.items()]
    path = directory / f"rank-{rank:05d}.safetensors"
    writer = TensorWriter(path, layout)
    try:
        for value in tensors.values():
            writer.append(value)
        writer.close()
    except BaseException:
        # Free the space, so that the failure can still be reported on a full disk.
        writer.abandon()
        path.unlink(missing_ok=True)
        raise
    ranges = {shard.name: (shard.start, shard.stop) for shard in sharded.shards}
    record = _RankRecord(ranges=ranges, num_bytes=writer.num_bytes, crc32=writer.crc32)
    write_json(path.with_suffix(".json"), seal(json.loads(record.model_dump_json())))


def _tensors(sharded: Sharded, optimizer: Optimizer | None) -> Iterator[tuple[str, Tensor]]:
    for shard in sharded.shards:
        yield f"{MODEL}/{shard.name}", shard.local
    if optimizer is not None:
        for name, state in optimizer.rule.state().items():
            for key, value in state.items():
                yield f"{key}/{name}", value


class _RankReader:
    """One rank's file of a checkpoint, open for reading."""

    def __init__(self, file: TensorFile, ranges: dict[str, tuple[int, int]]) -> None:
        self.file = file
        self.ranges = ranges
        self.keys: dict[str, list[str]] = {}  # parameter -> its keys of optimizer state
        for entry in file.entries:
            key, _, name = entry.partition("/")
            if key != MODEL:
                self.keys.setdefault(name, []).append(key)


def _open_rank(path: Path, rank: int, stack: ExitStack) -> _RankReader:
    file = path / f"rank-{rank:05d}.safetensors"
    try:
        record = _RankRecord.model_validate(unseal(file.with_suffix(".json").read_bytes()))
    except ValueError as error:
        raise ValueError(f"{file.with_suffix('.json').name} is damaged: {error}") from error
    if file.stat().st_size != record.num_bytes:
        raise ValueError(f"{file.name} has {file.stat().st_size} bytes, not {record.num_bytes}")
    if _crc32(file) != record.crc32:
        raise ValueError(f"{file.name} is damaged: its checksum does not match")
    return _RankReader(stack.enter_context(TensorFile(file)), record.ranges)


def _crc32(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            value = zlib.crc32(data, value)
    return value


def _fill(
    shard: LocalShard, key: str, target: Tensor, files: list[_RankReader], *, block: int = 1
) -> None:
    """Copy the ranges of all files that overlap a shard into `target` [stop - start].

    A file holds one value for every `block` elements, counted from its range's start.
    """
    filled = 0
    for source in files:
        start, stop = source.ranges[shard.name]
        low, high = max(start, shard.start), min(stop, shard.stop)
        if low >= high:
            continue
        first, end = (low - start) // block, -(-(high - start) // block)
        values = source.file.read(f"{key}/{shard.name}", first, end)
        if block > 1:
            values = values.repeat_interleave(block)[low - start - first * block :][: high - low]
        with torch.no_grad():
            target[low - shard.start : high - shard.start].copy_(values)
        filled += high - low
    if filled != shard.stop - shard.start:
        raise ValueError(f"{key} of {shard.name} is incomplete: {filled} elements found")


def _state(shard: LocalShard, files: list[_RankReader], rule: UpdateRule) -> dict[str, Tensor]:
    """Return the optimizer state of a shard: each key cut like the shard, or whole on the host."""
    found: dict[str, TensorFile] = {}
    for source in files:
        for key in source.keys.get(shard.name, []):
            found.setdefault(key, source.file)
    state = {}
    for key, file in found.items():
        described = file.entries[f"{key}/{shard.name}"]
        if key in rule.whole:
            state[key] = file.read(f"{key}/{shard.name}").view(described.shape)
        else:
            target = torch.empty(
                shard.stop - shard.start, dtype=described.dtype, device=shard.local.device
            )
            _fill(shard, key, target, files, block=rule.blocks.get(key, 1))
            state[key] = target
    return state
