"""Counts live memory: every storage that an operator makes, until its last tensor is freed.

On an accelerator the caching allocator counts it; elsewhere, and under fake tensors, nothing does. Bytes
are rounded up to blocks as that allocator would. Not seen: what a kernel allocates for itself.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# gloo's threads report completion before they release the tensors; on a busy machine long before.
_RELEASE_SECONDS = 0.01
BLOCK_BYTES = 512  # c10/cuda/CUDACachingAllocator.cpp: kMinBlockSize


class Section(NamedTuple):
    """A period whose peak is recorded; steps count from 1, micro-batches from 0."""

    phase: str
    step: int = 0
    micro_batch: int = 0


class Origin(NamedTuple):
    """What made a storage: the operator, the shape and type of its result, and when."""

    operator: str
    shape: tuple[int, ...]
    dtype: str
    phase: str


@dataclass
class Peak:
    """The most that was alive in one section, and the largest request made in it."""

    live_bytes: int = 0
    request_bytes: int = 0
    request: Origin | None = None


class LiveStorage(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, counts live storages; `section` names the period of a peak.

    Outside of a section storages are counted, too, but no peak is kept. With `real` (collectives that
    are run) it gives their threads time to release what they have sent.
    """

    def __init__(self, *, real: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._real = real
        self._after_collective = False
        self.peaks: dict[Section, Peak] = {}
        self.live_bytes = 0
        self._live: dict[int, tuple[int, Origin]] = {}
        self._section: Section | None = None
        self._highest = 0
        self._at_highest: dict[int, tuple[int, Origin]] | None = None
        self._shapes_only = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor for kind in types):
            return NotImplemented  # it calls operators on its local parts: those are counted
        if self._after_collective:
            time.sleep(_RELEASE_SECONDS)
        self._after_collective = self._real and func.namespace == "c10d"
        result = func(*args, **(kwargs or {}))
        if not self._shapes_only:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                    self._record(leaf, func)
        return result

    @contextmanager
    def section(self, phase: str, *, step: int = 0, micro_batch: int = 0) -> Iterator[None]:
        """Record the peak of what runs inside."""
        before, self._section = self._section, Section(phase, step, micro_batch)
        self.peaks[self._section] = Peak(self.live_bytes)
        try:
            yield
        finally:
            self._section = before

    @property
    def alive_at_peak(self) -> list[tuple[Origin, int, int]]:
        """The storages alive at the highest peak: (origin, their number, their bytes), largest first."""
        alive = self._live if self._at_highest is None else self._at_highest
        total: Counter[Origin] = Counter()
        number: Counter[Origin] = Counter()
        for size, origin in alive.values():
            if size:  # not resized to nothing
                total[origin] += size
                number[origin] += 1
        return [(origin, number[origin], size) for origin, size in total.most_common()]

    def _record(self, tensor: Tensor, func: Any) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            dtype = str(tensor.dtype).removeprefix("torch.")
            phase = self._section.phase if self._section else "between"
            self._live[key] = (0, Origin(str(func), tuple(tensor.shape), dtype, phase))
            weakref.finalize(storage, self._release, key).atexit = False
            self._resize(key, storage.nbytes())

    def _resize(self, key: int, size_bytes: int) -> None:
        """Count a storage at its present size; FSDP allocates and frees by resizing."""
        before, origin = self._live[key]
        size = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        if size < before:
            self._save_peak()
        self._live[key] = (size, origin)
        self.live_bytes += size - before
        if self._section is None:
            return
        peak = self.peaks[self._section]
        if size - before > peak.request_bytes:
            peak.request_bytes, peak.request = size - before, origin
        peak.live_bytes = max(peak.live_bytes, self.live_bytes)
        if self.live_bytes > self._highest:
            self._highest, self._at_highest = self.live_bytes, None

    def _release(self, key: int) -> None:
        self._save_peak()
        self.live_bytes -= self._live.pop(key)[0]

    def _save_peak(self) -> None:
        """Save the live storages before one is freed, if this is the highest peak so far."""
        if self._at_highest is None and self.live_bytes == self._highest:
            self._at_highest = dict(self._live)

    @contextmanager
    def counting(self) -> Iterator[LiveStorage]:
        """Enter the mode, track resized storages, and ignore what DTensor makes to propagate shapes."""
        resize, propagate = _resize_storage, _propagate

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._live:
                self._resize(storage._cdata, storage.nbytes())
            return result

        def propagated(propagator: Any, *args: Any, **kwargs: Any) -> Any:
            self._shapes_only += 1
            try:
                return propagate(propagator, *args, **kwargs)
            finally:
                self._shapes_only -= 1

        with (
            replaced(torch.UntypedStorage, "resize_", resized),
            replaced(ShardingPropagator, _PROPAGATE, propagated),
            self,
        ):
            yield self


_resize_storage = torch.UntypedStorage.resize_
_PROPAGATE = (
    "_propagate_tensor_meta_non_cached"
    if hasattr(ShardingPropagator, "_propagate_tensor_meta_non_cached")
    else "_propagate_tensor_meta"  # torch 2.5
)
_propagate = getattr(ShardingPropagator, _PROPAGATE)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or class inside the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
