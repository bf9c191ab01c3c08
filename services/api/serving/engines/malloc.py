"""Keeps the process's memory near that of the weights. Torch-free.

glibc keeps what was freed for the next allocation of its size. Weights come and go in pieces of many
sizes, so what it keeps is seldom what is asked for next: laying out a student's weights block by block
beside one that serves took 4,107 MiB of anonymous memory where the student has 2,274 (Qwen3-0.6B's shape
in float32), and 2,455 when freed blocks went back at once.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import sys
from collections.abc import Callable

# oneDNN keeps the code of a product for each number of tokens it met, and torch's layer over it does too,
# 0.3 MiB each: up to their own limit of 1,024 that makes 440 MiB. A code made anew takes 1 ms,
# next to nothing beside Qwen3-0.6B's products; a student of 4 layers, 256 wide, took 6.0 ms for a text by
# itself where it took 4.2 with 1,024.
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
_CACHED_PRODUCTS = 128


def bound_caches() -> None:
    """Bound what torch will keep, unless the environment says otherwise. Before torch is loaded."""
    for name in _CACHES:
        os.environ.setdefault(name, str(_CACHED_PRODUCTS))


def trim() -> None:
    """Give back what is free already: some milliseconds, and nothing where the C library has no way."""
    give_back = _malloc_trim()
    if give_back is not None:
        give_back(0)


def return_memory() -> None:
    """Collect garbage, then give back what is free."""
    gc.collect()
    trim()


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    if sys.platform != "linux":
        return None
    give_back: Callable[[int], int] | None
    give_back = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it, musl does not
    return give_back
