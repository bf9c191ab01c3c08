"""Keeps the memory of the process close to the size of the weights. Torch-free.

glibc keeps freed blocks for later allocations of the same size. Weights are allocated and freed in blocks
of many sizes, so these are seldom reused: converting a student's weights block by block next to one that
serves took 4,107 MiB of anonymous memory for 2,274 MiB of weights (Qwen3-0.6B's shape in float32), and
2,455 MiB when freed blocks were returned to the kernel at once.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Callable

# oneDNN caches the code of a matrix product for each number of tokens, and so does torch's layer above
# it, 0.3 MiB each: 440 MiB up to their default limit of 1,024 entries. Regenerating an entry takes 1 ms,
# which is negligible next to Qwen3-0.6B's products; a student of 4 layers of width 256 took 6.0 ms for a
# single text instead of 4.2 with 1,024 entries.
_CACHE_LIMITS = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_MAX_CACHED_PRODUCTS = 128


def limit_kernel_caches() -> None:
    """Limit torch's caches, unless the environment sets them. Call before torch is imported."""
    for name in _CACHE_LIMITS:
        os.environ.setdefault(name, str(_MAX_CACHED_PRODUCTS))


def collect_and_trim() -> None:
    """Collect garbage, then return free memory to the kernel."""
    gc.collect()
    trim_heap()


def trim_heap() -> None:
    """Return free memory to the kernel: takes milliseconds, and does nothing without glibc."""
    malloc_trim = _malloc_trim()
    if malloc_trim is not None:
        malloc_trim(0)


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    malloc_trim: Callable[[int], int] | None
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
    return malloc_trim
