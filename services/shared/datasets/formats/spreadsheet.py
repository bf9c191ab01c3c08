"""Excel workbooks (.xlsx), read row by row; what their archive may unpack to is bounded first."""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openpyxl

from services.shared.datasets.formats.records import (
    MAX_COLUMNS,
    MAX_ROWS,
    Record,
    file_fault,
    header_faults,
    missing_column_fault,
)
from services.shared.datasets.upload import Fault

# openpyxl holds all distinct strings of a workbook in memory: about four times their size in the archive.
MAX_UNPACKED_BYTES = 512 * 2**20


def read_xlsx(
    path: Path, *, header: list[str] | None, required: list[str]
) -> Iterator[Record | Fault]:
    """Yield the rows of the first sheet; `header` names the columns of a sheet without a header row."""
    names = header
    for line, row in xlsx_rows(path):
        if isinstance(row, Fault):
            yield row
            return
        if names is None:
            names = ["" if cell is None else str(cell) for cell in row]
            while names and not names[-1]:
                names.pop()
            faults = header_faults(names, line=line) or [
                missing_column_fault(name, names, line=line)
                for name in required
                if name not in names
            ]
            yield from faults
            if faults:
                return
        else:
            cells = row[: len(names)] + [None] * (len(names) - len(row))
            yield Record(line, dict(zip(names, cells, strict=True)))


def xlsx_rows(path: Path) -> Iterator[tuple[int, list[Any] | Fault]]:
    """Yield (row number, cells) of the first sheet without empty rows."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked > MAX_UNPACKED_BYTES:
            yield (
                1,
                file_fault(f"unpacks to more than {MAX_UNPACKED_BYTES:,} bytes; save it as CSV"),
            )
            return
        with path.open("rb") as file, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # styles and extensions that do not concern the text
            workbook = openpyxl.load_workbook(file, read_only=True, data_only=True)
            sheet = workbook.worksheets[0]
            for line, row in enumerate(sheet.iter_rows(values_only=True, max_col=MAX_COLUMNS), 1):
                if line > MAX_ROWS:
                    yield line, file_fault(f"has more than {MAX_ROWS:,} rows")
                    return
                if any(cell is not None for cell in row):
                    yield line, [_plain(cell) for cell in row]
    except MemoryError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        yield 1, file_fault(f"is not a readable Excel workbook: {str(error)[:200]}")


def sheet_names(path: Path) -> list[str]:
    """Return the names of the sheets, of which only the first is read."""
    try:
        with path.open("rb") as file:
            names = list(openpyxl.load_workbook(file, read_only=True).sheetnames)
    except Exception:  # noqa: BLE001  as above; reading the rows reports it
        return []
    return names


def _plain(cell: Any) -> Any:
    if cell is None or isinstance(cell, str | bool | int | float):
        return cell
    return str(cell)  # dates and times
