"""Lets one process of a machine load a student at a time: each load needs memory and all cores."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_POLL_SECONDS = 0.2


class LoadAbandoned(Exception):
    """The process stopped while it waited for its turn to load."""


@contextmanager
def one_load_at_a_time(path: Path | None, *, stopping: Callable[[], bool]) -> Iterator[None]:
    """Hold the lock file `path`, which the kernel releases when the process ends in any way.

    Waits as long as another process holds it. Raises LoadAbandoned once `stopping`, OSError where the
    file cannot be opened. Without a path, nothing is locked.
    """
    if path is None:
        yield
        return
    with path.open("a") as file:
        while not _try_lock(file.fileno()):
            if stopping():
                raise LoadAbandoned
            time.sleep(_POLL_SECONDS)
        yield


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
