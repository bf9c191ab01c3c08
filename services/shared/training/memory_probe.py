"""Measured memory of each rank: once after wrapping, before the first step, then in every phase.

On an accelerator the figures are the caching allocator's. A CPU has no such counters: there the live
parameters, gradients and optimizer state of the rank are walked and counted, which leaves activations
and temporaries out, as `basis` of the record states; the resident set is recorded as well.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from services.shared.jobs.documents import ObservedShardingDict
from services.shared.jobs.run_directory import MemoryRecord, RunDirectory, append_record
from services.shared.jobs.state import Reason
from services.shared.training.optim.optimizer import Optimizer
from services.shared.training.process import Position, RunFailed, World
from services.shared.training.sharding.shard import Sharded

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# Every phase of the first steps, where peaks settle; afterwards a new peak, or every so many steps.
FIRST_STEPS = 3
EVERY_STEPS = 50
_EVERY_STEP = ("forward", "backward", "optimizer_step")


class MemoryProbe:
    """Records one rank's memory by phase, and keeps its `Position` up to date."""

    def __init__(self, run: RunDirectory, world: World, position: Position) -> None:
        self._file = run.memory_file(world.rank)
        self._world = world
        self._position = position
        self._sharded: Sharded | None = None
        self._optimizer: Optimizer | None = None
        self._peaks: dict[str, int] = {}

    def watch(self, sharded: Sharded, optimizer: Optimizer | None) -> None:
        """Set the model and optimizer to count on devices without allocator counters."""
        self._sharded, self._optimizer = sharded, optimizer

    @contextmanager
    def phase(self, name: str, *, step: int = 0) -> Iterator[None]:
        """Measure one phase; if it fails, the failure is reported with its name."""
        before = self._position.phase
        self._position.phase, self._position.step = name, step
        has_counters = self._world.device.type == "cuda"
        if has_counters:
            torch.cuda.reset_peak_memory_stats()
        yield  # no try: a failing rank is reported in the phase it failed in
        is_rare = name not in _EVERY_STEP
        due = is_rare or step <= FIRST_STEPS or step % EVERY_STEPS == 0
        if due or has_counters:  # walking takes longer than reading counters
            record = self.measure(name, step)
            if due or record.peak_allocated_bytes > self._peaks[name]:
                append_record(self._file, record)
            self._peaks[name] = max(record.peak_allocated_bytes, self._peaks.get(name, 0))
        self._position.phase = before

    def measure(self, phase: str, step: int = 0) -> MemoryRecord:
        """Return the memory in use on this rank, and its peak since the phase began."""
        now, resident = time.time(), _resident_bytes()
        if self._world.device.type == "cuda":
            return MemoryRecord(
                time=now,
                phase=phase,
                step=step,
                host_rss_bytes=resident,
                allocated_bytes=torch.cuda.memory_allocated(),
                reserved_bytes=torch.cuda.memory_reserved(),
                peak_allocated_bytes=torch.cuda.max_memory_allocated(),
                peak_reserved_bytes=torch.cuda.max_memory_reserved(),
                device_total_bytes=torch.cuda.mem_get_info()[1],
                basis="allocator",
            )
        held = storage_bytes(self._counted_tensors())
        return MemoryRecord(
            time=now,
            phase=phase,
            step=step,
            host_rss_bytes=resident,
            allocated_bytes=held,
            peak_allocated_bytes=max(held, self._peaks.get(phase, 0)),
            basis="live parameters, gradients and optimizer state; no activations or temporaries",
        )

    def _counted_tensors(self) -> Iterator[Tensor]:
        if self._sharded is not None:
            for shard in self._sharded.shards:
                yield shard.local
                gradient = shard.gradient()
                if gradient is not None:
                    yield gradient
        if self._optimizer is not None:
            for state in self._optimizer.rule.state().values():
                yield from state.values()

    def check_sharding(self, sharded: Sharded) -> None:
        """Record the result of wrapping on this rank, and stop the run if it differs from the recipe.

        Raises RunFailed(NOT_SHARDED) on every rank if it fails on any.
        """
        self.watch(sharded, None)
        record = self.measure("wrap")
        observed = observe_sharding(sharded, self._world)
        observed["basis"] = record.basis
        observed["allocated_bytes"] = record.allocated_bytes
        observed["reserved_bytes"] = record.reserved_bytes
        record.observed = observed
        append_record(self._file, record)
        faults = _sharding_faults(observed, sharded, allocated=record.allocated_bytes)
        covered = self._world.sum(
            [float(len(faults))] + [float(shard.stop - shard.start) for shard in sharded.shards]
        )
        copies = self._world.size if sharded.replicated else 1
        for shard, held in zip(sharded.shards, covered[1:], strict=True):
            if held != shard.num_elements * copies:
                faults.append(
                    f"the ranks together hold {held:.0f} elements of {shard.name}, "
                    f"not {shard.num_elements * copies}"
                )
                break
        if faults or covered[0]:
            fault = faults[0] if faults else "another rank is not sharded as planned"
            raise RunFailed(Reason.NOT_SHARDED, f"Stopped before the first step: {fault}.")


def observe_sharding(sharded: Sharded, world: World) -> ObservedShardingDict:
    """Return what this rank holds after wrapping, and what the recipe expects it to hold."""
    parameters = [shard.local for shard in sharded.shards]
    item = parameters[0].dtype.itemsize
    return {
        "engine": str(sharded.engine),
        "ranks": world.size,
        "sharding": sharded.recipe.sharding,
        "sharded_units": _live_units(sharded),
        "expected_units": len(sharded.units),
        "local_parameter_bytes": storage_bytes(parameters),
        "expected_local_parameter_bytes": sum(u.rank_elements for u in sharded.units) * item,
        "whole_model_bytes": sharded.num_parameters * item,
        "largest_unit_bytes": max(u.num_elements for u in sharded.units) * item,
        "parameter_dtypes": sorted({str(p.dtype).removeprefix("torch.") for p in parameters}),
    }


def _live_units(sharded: Sharded) -> int:
    """Return the number of units that the engine has actually formed."""
    count = 0
    for module in sharded.module.modules():
        is_fsdp2 = hasattr(module, "set_requires_gradient_sync")
        is_fsdp1 = getattr(module, "_handle", None) is not None
        count += is_fsdp2 or is_fsdp1
    return count


def _sharding_faults(
    observed: ObservedShardingDict, sharded: Sharded, *, allocated: int
) -> list[str]:
    faults = []
    if observed["sharded_units"] != observed["expected_units"]:
        faults.append(
            f"{observed['sharded_units']} sharding units were formed, "
            f"{observed['expected_units']} planned"
        )
    held, expected = observed["local_parameter_bytes"], observed["expected_local_parameter_bytes"]
    # Each unit's storage may be padded to a multiple of the ranks, and to an allocator block.
    slack = len(sharded.shards) * 512
    if held > expected + slack:
        faults.append(f"this rank holds {held} bytes of parameters, {expected} planned")
    if len(observed["parameter_dtypes"]) != 1:
        faults.append(f"parameters have several types: {', '.join(observed['parameter_dtypes'])}")
    if sharded.shards[0].local.device.type == "cuda":
        limit = expected + observed["largest_unit_bytes"] + slack
        if allocated > limit:
            faults.append(
                f"{allocated} bytes are allocated after wrapping, at most {limit} planned"
            )
    return faults


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the distinct storages behind some tensors."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _resident_bytes() -> int | None:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            return int(file.read().split()[1]) * _PAGE_BYTES
    except OSError:
        return None
