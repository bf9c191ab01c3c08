"""Thread counts, set where the threads run: torch keeps them a thread."""

from __future__ import annotations

import threading

import torch

_here = threading.local()


def use_threads(count: int) -> None:
    """Let torch use `count` threads for what the calling thread computes."""
    if getattr(_here, "count", None) != count:
        torch.set_num_threads(count)
        _here.count = count
