"""Rows of an upload, one after the other, whatever they are made of. Never loads the whole file."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from services.shared.datasets.upload import Fault, Format

# The longest text a job can use is 131,072 tokens (spec.Training.max_length); 4 MiB hold that and
# its labels in any script. A longer line is a file of another kind.
MAX_LINE_BYTES = 4 * 2**20

# What Parquet may unpack to: a small file that claims more was made to fill the memory. One that claims
# less than it unpacks to meets the limits of the process that reads it (confined.py).
MAX_UNPACKED_BYTES = 16 * 2**30
MAX_PARQUET_ROWS = 20_000_000  # a repeated row takes no space, but time
_PARQUET_ROWS = 128  # of the longest texts, what 128 MB hold

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """A row as it was read; values are whatever the format can hold."""

    line: int
    fields: dict[str, Any]


def read_records(path: Path, *, format: Format, columns: list[str]) -> Iterator[Record | Fault]:
    """Yield every row, or the fault that stands in its place, in the order of the file.

    `columns` are those wanted; JSONL and CSV may yield others too. Raises OSError.
    """
    if format is Format.JSONL:
        return _read_jsonl(path)
    if format is Format.CSV:
        return _read_csv(path, columns=columns)
    return _read_parquet(path, columns=columns)


def _read_jsonl(path: Path) -> Iterator[Record | Fault]:
    for number, line in _text_lines(path):
        if isinstance(line, Fault):
            yield line
            continue
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except RecursionError:
            yield Fault(line=number, field=None, message="is nested too deeply")
            continue
        except ValueError as error:
            yield Fault(line=number, field=None, message=f"is not JSON: {error}")
            continue
        if isinstance(value, dict):
            yield Record(number, value)
        else:
            yield Fault(line=number, field=None, message="is not a JSON object")


def _read_csv(path: Path, *, columns: list[str]) -> Iterator[Record | Fault]:
    header: list[str] | None = None
    for line, row in _csv_rows(path):
        if isinstance(row, Fault):
            yield row
        elif header is None:
            header = row
            faults = _header_faults(header, columns)
            yield from faults
            if faults:
                return
        elif len(row) != len(header):
            message = f"has {len(row)} fields where the header has {len(header)}"
            yield Fault(line=line, field=None, message=message)
        else:
            yield Record(line, dict(zip(header, row, strict=True)))


def _header_faults(header: list[str], columns: list[str]) -> list[Fault]:
    faults = [
        Fault(line=1, field=name[:200], message="the header names this column twice")
        for name in sorted({name for name in header if header.count(name) > 1})
    ]
    if columns[0] not in header:
        faults.append(_no_column(columns[0], header, line=1))
    return faults


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str] | Fault]]:
    """Yield (line on which the row begins, its fields or what is wrong); skip empty lines."""
    faults: list[Fault] = []
    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.reader(_decoded(path, faults), strict=True)
    while True:
        line = rows.line_num + 1
        wrong = None
        try:
            row = next(rows, None)
        except csv.Error as error:
            row, wrong = [], Fault(line=line, field=None, message=f"is not CSV: {error}")
        for fault in faults:
            yield line, fault
        faults.clear()
        if wrong is not None:
            yield line, wrong
            if rows.line_num > line:  # a quote left open has swallowed what follows
                return
        if row is None:
            return
        if row:
            yield line, row


def _decoded(path: Path, faults: list[Fault]) -> Iterator[str]:
    """Yield lines for the CSV parser, which counts them; a faulty one is empty and noted."""
    for _, line in _text_lines(path):
        if isinstance(line, Fault):
            faults.append(line)
            yield "\n"
        else:
            yield line


def _text_lines(path: Path) -> Iterator[tuple[int, str | Fault]]:
    """Yield (number from 1, line with its end) or what is wrong with the line."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES):
            number += 1
            if len(raw) == MAX_LINE_BYTES and not raw.endswith(b"\n"):
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                message = f"is longer than {MAX_LINE_BYTES:,} bytes"
                yield number, Fault(line=number, field=None, message=message)
                continue
            if number == 1:
                raw = raw.removeprefix(_BOM)
            try:
                yield number, raw.decode("utf-8")
            except UnicodeDecodeError as error:
                message = (
                    f"is not UTF-8: byte {error.start + 1} of the line is 0x{raw[error.start]:02x}"
                )
                yield number, Fault(line=number, field=None, message=message)


def _read_parquet(path: Path, *, columns: list[str]) -> Iterator[Record | Fault]:
    try:
        with pq.ParquetFile(path) as file:
            fault = _parquet_fault(file, columns)
            if fault is not None:
                yield fault
                return
            wanted = [name for name in columns if name in file.schema_arrow.names]
            first_row = 1
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=wanted):
                yield from _batch_records(batch, first_row)
                first_row += batch.num_rows
    except MemoryError:  # Arrow's own is an ArrowException too
        raise
    except (pa.ArrowException, ValueError, OSError) as error:  # ValueError: names not in UTF-8
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's fault, not the file's
        message = f"is not a readable Parquet file: {str(error).splitlines()[0][:300]}"
        yield Fault(line=None, field=None, message=message)


def _parquet_fault(file: pq.ParquetFile, columns: list[str]) -> Fault | None:
    names = file.schema_arrow.names
    twice = [name for name in columns if names.count(name) > 1]
    if twice:
        return Fault(line=None, field=twice[0], message="there are two columns of this name")
    if columns[0] not in names:
        return _no_column(columns[0], names, line=None)
    if file.metadata.num_rows > MAX_PARQUET_ROWS:
        return Fault(line=None, field=None, message=f"has more than {MAX_PARQUET_ROWS:,} rows")
    groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
    if sum(group.total_byte_size for group in groups) > MAX_UNPACKED_BYTES:
        message = f"unpacks to more than {MAX_UNPACKED_BYTES:,} bytes"
        return Fault(line=None, field=None, message=message)
    return None


def _batch_records(batch: pa.RecordBatch, first_row: int) -> Iterator[Record | Fault]:
    try:
        rows = batch.to_pylist()
    except ValueError:  # text that is not UTF-8: find the rows
        for offset in range(batch.num_rows):
            try:
                row = batch.slice(offset, 1).to_pylist()[0]
            except ValueError:
                message = "holds text that is not UTF-8"
                yield Fault(line=first_row + offset, field=None, message=message)
            else:
                yield Record(first_row + offset, row)
        return
    for offset, row in enumerate(rows):
        yield Record(first_row + offset, row)


def _no_column(name: str, known: list[str], *, line: int | None) -> Fault:
    listed = ", ".join(repr(column[:80]) for column in known[:20])
    return Fault(line=line, field=name, message=f"there is no such column; there are {listed}")
