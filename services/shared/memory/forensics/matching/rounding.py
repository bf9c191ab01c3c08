"""How an allocator rounds the size of a tensor to the request that it prints.

Source: c10/cuda/CUDACachingAllocator.cpp (`round_size`, `get_allocation_size`); torch_npu
NPUCachingAllocator.cpp for the 32 bytes that Ascend adds.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.shared.memory.oom_log.message_formats import Backend
from services.shared.memory.oom_log.message_parser import PrintedSize
from services.shared.memory.sizes import MIB

_BLOCK = 512
_SMALL_REQUEST = 1 * MIB  # at most this is served from segments of 2 MiB
_SMALL_SEGMENT = 2 * MIB
_LARGE_REQUEST = 10 * MIB  # below this a segment of 20 MiB is asked for
_LARGE_SEGMENT = 20 * MIB
_LARGE_STEP = 2 * MIB
_NPU_PADDING = 32
# Back ends that print the tensor's own size instead of a segment's.
_EXACT_BACKENDS = frozenset({Backend.HOST, Backend.HPU})


@dataclass(frozen=True)
class Rounding:
    """How the allocator rounds a tensor's size to a request."""

    backend: Backend = Backend.CUDA
    power2_divisions: int | None = None  # roundup_power2_divisions, where it was set

    def driver_request(self, size_bytes: int) -> int:
        """Return the bytes requested from the driver when no cached block fits `size_bytes`."""
        if self.backend in _EXACT_BACKENDS:
            return size_bytes
        if self.backend is Backend.NPU:
            size_bytes += _NPU_PADDING
        rounded = self._round(size_bytes)
        if rounded <= _SMALL_REQUEST:
            return _SMALL_SEGMENT
        if rounded < _LARGE_REQUEST:
            return _LARGE_SEGMENT
        return -(-rounded // _LARGE_STEP) * _LARGE_STEP

    def _round(self, size_bytes: int) -> int:
        divisions = self.power2_divisions
        if divisions and divisions > 1 and size_bytes > _BLOCK * divisions:
            power = 1 << (size_bytes.bit_length() - 1)
            step = max(power // divisions, 1)
            return -(-size_bytes // step) * step
        return max(_BLOCK, -(-size_bytes // _BLOCK) * _BLOCK)


def is_segment_size(requested: PrintedSize, rounding: Rounding) -> bool:
    """Return whether the printed size is that of a segment, which every small tensor requests."""
    if rounding.backend in _EXACT_BACKENDS:
        return False
    return any(requested.covers(size) for size in (_SMALL_SEGMENT, _LARGE_SEGMENT)) or (
        requested.size_bytes < _SMALL_SEGMENT
    )
