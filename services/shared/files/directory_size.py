"""How many bytes the files of a directory take."""

from __future__ import annotations

import os
from pathlib import Path


def directory_bytes(directory: Path) -> int:
    """Return the bytes of all files below a directory, 0 where it is absent.

    A file that vanishes meanwhile counts nothing, and so does a link.
    """
    total = 0
    pending = [os.fspath(directory)]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        total += entry.stat(follow_symlinks=False).st_size
        except (FileNotFoundError, NotADirectoryError):
            continue
    return total
