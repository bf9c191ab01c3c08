"""The end of a text file that may be large and may still be growing."""

from __future__ import annotations

import os
from pathlib import Path


def read_tail(path: Path, *, max_bytes: int) -> str:
    """Return the last `max_bytes` of a file as text, invalid UTF-8 replaced; empty without a file."""
    return _end(path, max_bytes)[0]


def read_last_lines(path: Path, *, max_bytes: int) -> str:
    """Return the whole lines in the last `max_bytes` of a file; empty without a file."""
    text, is_cut = _end(path, max_bytes)
    return text.partition("\n")[2] if is_cut else text


def _end(path: Path, max_bytes: int) -> tuple[str, bool]:
    try:
        with path.open("rb") as file:
            start = max(0, file.seek(0, os.SEEK_END) - max_bytes)
            file.seek(start)
            return file.read(max_bytes).decode("utf-8", "replace"), start > 0
    except FileNotFoundError:
        return "", False
