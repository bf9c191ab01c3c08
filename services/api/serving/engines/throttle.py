"""Throttling of background work, such as loading a model, while requests need the CPU. Torch-free.

Cores share caches and memory bandwidth, and virtual cores often share a physical one: loading a model and
checking it next to one that serves made requests a third slower, whatever threads were pinned where.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_MAX_PAUSE_SECONDS = 0.5


class _Throttle(threading.local):
    """The throttling state of the calling thread."""

    has_requests: Callable[[], bool] | None = None  # None where the thread is not throttled
    last_pause_end = 0.0


_throttle = _Throttle()


@contextmanager
def throttled(has_requests: Callable[[], bool]) -> Iterator[None]:
    """Make `yield_to_requests` pause within this context while there are requests; this thread only."""
    _throttle.has_requests, _throttle.last_pause_end = has_requests, time.monotonic()
    try:
        yield
    finally:
        _throttle.has_requests = None


def yield_to_requests() -> None:
    """Sleep for as long as this throttled thread has worked since its last pause, half a second at most.

    Returns at once in threads that are not throttled and while there are no requests.
    """
    if _throttle.has_requests is None:
        return
    if _throttle.has_requests():
        time.sleep(min(time.monotonic() - _throttle.last_pause_end, _MAX_PAUSE_SECONDS))
    _throttle.last_pause_end = time.monotonic()
