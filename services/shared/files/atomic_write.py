"""Atomic writes: a reader sees either no file or the whole file.

Content is written under a temporary name in the same directory, synced, and renamed. Every temporary
name starts with a dot and ends in `.partial`, so that a clean-up can recognise what a killed process
left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"


def shared_partial_path(final: Path) -> Path:
    """Return the temporary path of `final` that all ranks of a job write to."""
    return final.with_name(f".{final.name}{PARTIAL}")


def partial_path(final: Path) -> Path:
    """Return the temporary path of `final` that only this process writes to."""
    return final.with_name(f".{final.name}.{os.getpid()}{PARTIAL}")


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary path; when the block ends, sync the file written there and rename it to `path`.

    Creates missing parent directories. After an exception `path` is unchanged and the temporary file
    is gone. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = partial_path(path)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a whole UTF-8 file atomically. Raises OSError."""
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Flush a file, or the entries of a directory, to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
