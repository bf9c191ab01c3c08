"""The number of threads of torch operations, which torch keeps per calling thread."""

from __future__ import annotations

import threading

import torch

_local = threading.local()


def use_threads(count: int) -> None:
    """Let torch operations of the calling thread use `count` threads."""
    if getattr(_local, "count", None) != count:
        torch.set_num_threads(count)
        _local.count = count
