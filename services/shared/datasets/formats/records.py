"""What every reader yields, and the limits that all of them keep."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from services.shared.datasets.card import Split
from services.shared.datasets.upload import FatalFault, Fault

# The longest text a job can use is 131,072 tokens (spec.Training.max_length); 4 MiB hold that and
# its labels in any script. A file with a longer line is not text with labels.
MAX_LINE_BYTES = 4 * 2**20
MAX_COLUMNS = 4096  # a wider table is not text with labels
MAX_ROWS = 20_000_000  # repeated rows take no space in a compressed file, but they take time
# A small file whose metadata declares more than this is a decompression bomb. A file that understates its
# size is stopped by the limits of the subprocess that reads it (sandbox.py).
MAX_UNCOMPRESSED_BYTES = 16 * 2**30


@dataclass(frozen=True)
class Record:
    """A row as it was read; values are of any type that the format can hold."""

    line: int
    fields: dict[str, Any]
    split: Split | None = None  # as the file's name states it


def header_faults(header: list[str], *, line: int | None) -> list[Fault]:
    """Return the faults of a header in time linear in its size."""
    if len(header) > MAX_COLUMNS:
        message = f"the header has {len(header):,} columns; at most {MAX_COLUMNS:,} are read"
        return [FatalFault(line=line, field=None, message=message)]
    return [
        FatalFault(line=line, field=name[:200], message="the header contains this column twice")
        for name, count in sorted(Counter(header).items())
        if count > 1
    ]


def missing_column_fault(name: str, columns: list[str], *, line: int | None) -> Fault:
    """Return the fault of a file without the column `name`."""
    listed = ", ".join(repr(column[:80]) for column in columns[:20])
    more = f", and {len(columns) - 20:,} more" if len(columns) > 20 else ""
    return FatalFault(line=line, field=name, message=f"no such column; the file has {listed}{more}")


def file_fault(message: str) -> Fault:
    """Return a fault of the whole upload."""
    return Fault(line=None, field=None, message=message)
