"""Lets work aside, such as loading a student, leave the processors to requests every other moment. Torch-free.

Cores share caches and memory, and virtual ones often a real core: a student that is laid out and tried
beside one that serves made requests a third slower, whatever thread had which core.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LONGEST_REST_SECONDS = 0.5


class _Pace(threading.local):
    """Whose turn it is, for the thread that works aside."""

    is_wanted: Callable[[], bool] | None = None  # whether requests want the processors
    rested = 0.0  # when the last rest ended


_pace = _Pace()


@contextmanager
def aside(is_wanted: Callable[[], bool]) -> Iterator[None]:
    """Within, `rest` rests while requests want the processors. Only for this thread."""
    _pace.is_wanted, _pace.rested = is_wanted, time.monotonic()
    try:
        yield
    finally:
        _pace.is_wanted = None


def rest() -> None:
    """Rest as long as this thread has worked since it last did, if it works aside and is in the way."""
    if _pace.is_wanted is None:
        return
    if _pace.is_wanted():
        time.sleep(min(time.monotonic() - _pace.rested, _LONGEST_REST_SECONDS))
    _pace.rested = time.monotonic()
