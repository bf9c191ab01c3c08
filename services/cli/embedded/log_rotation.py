"""Bounds the size of the logs of components that run for months."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

MAX_LOG_BYTES = 64 * 2**20


def rotate(log: Path, *, max_bytes: int = MAX_LOG_BYTES) -> bool:
    """Move a log's content to `<log>.1` once it exceeds `max_bytes`; return whether it did.

    The content is copied and the file emptied in place: the component writes to a descriptor that it
    keeps open for appending, and so continues at the new end. What it writes between the two is lost.
    """
    try:
        if log.stat().st_size <= max_bytes:
            return False
        shutil.copyfile(log, log.with_name(f"{log.name}.1"))
        os.truncate(log, 0)
    except OSError:  # no log yet, or a full disk: the component matters more than its log
        return False
    return True
