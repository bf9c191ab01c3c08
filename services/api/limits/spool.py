"""Copies of uploads on disk while they are read, and those that a killed process has left.

A copy is locked for as long as its process lives: the kernel releases the lock of one that is killed. It
gets its name once it is locked, so that an unlocked file of that name is always abandoned.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import structlog

log = structlog.get_logger(__name__)

_SUFFIX = ".upload"
_UNPACKED = ".unpacked"  # the directory next to an upload that its archives are unpacked to
_CHUNK_BYTES = 2**20


@contextmanager
def spooled(source: IO[bytes], directory: Path) -> Iterator[Path]:
    """Yield the path of a copy of `source` in `directory`, removed at the end. Raises OSError."""
    descriptor, unnamed = tempfile.mkstemp(dir=directory)
    path = Path(unnamed)
    with open(descriptor, "wb") as copy:  # noqa: PTH123 - of a descriptor
        try:
            fcntl.flock(copy, fcntl.LOCK_EX)
            path = path.rename(path.with_name(path.name + _SUFFIX))
            shutil.copyfileobj(source, copy, _CHUNK_BYTES)
            copy.flush()
            yield path
        finally:
            path.unlink(missing_ok=True)


def remove_abandoned(directory: Path) -> list[Path]:
    """Remove the copies of killed processes, and what was unpacked of them; return the paths."""
    removed = [path for path in directory.glob(f"*{_SUFFIX}") if _remove_unlocked(path)]
    for unpacked in directory.glob(f"*{_SUFFIX}{_UNPACKED}"):
        if not unpacked.with_name(unpacked.name.removesuffix(_UNPACKED)).exists():
            shutil.rmtree(unpacked, ignore_errors=True)
            removed.append(unpacked)
    for path in removed:
        log.info("abandoned_upload_removed", path=str(path))
    return removed


def _remove_unlocked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:  # it is in use
        return False
    finally:
        os.close(descriptor)
    return True
