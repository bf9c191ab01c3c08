"""Streams the rows of an upload in any supported format; never loads the whole file."""

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
# its labels in any script. A file with a longer line is not text with labels.
MAX_LINE_BYTES = 4 * 2**20

# A small file whose metadata declares more than this is a decompression bomb. A file that understates its
# size is stopped by the limits of the subprocess that reads it (sandbox.py).
MAX_UNCOMPRESSED_BYTES = 16 * 2**30
MAX_PARQUET_ROWS = 20_000_000  # repeated rows take no space, but they take time
_PARQUET_BATCH_ROWS = 128  # 128 MB of the longest texts

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Record:
    """A row as it was read; values are of any type that the format can hold."""

    line: int
    fields: dict[str, Any]


def read_records(path: Path, *, format: Format, columns: list[str]) -> Iterator[Record | Fault]:
    """Yield every row, or a fault in its place, in the order of the file.

    `columns` are those needed, the text column first; JSONL and CSV may yield others too. Raises OSError.
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
            yield Fault(line=number, field=None, message=f"is not valid JSON: {error}")
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
            message = f"has {len(row)} fields, but the header has {len(header)}"
            yield Fault(line=line, field=None, message=message)
        else:
            yield Record(line, dict(zip(header, row, strict=True)))


def _header_faults(header: list[str], columns: list[str]) -> list[Fault]:
    faults = [
        Fault(line=1, field=name[:200], message="the header contains this column twice")
        for name in sorted({name for name in header if header.count(name) > 1})
    ]
    if columns[0] not in header:
        faults.append(_missing_column_fault(columns[0], header, line=1))
    return faults


def _csv_rows(path: Path) -> Iterator[tuple[int, list[str] | Fault]]:
    """Yield (first line of the row, its fields or a fault); skip empty lines."""
    faults: list[Fault] = []
    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.reader(_decoded(path, faults), strict=True)
    while True:
        line = rows.line_num + 1
        syntax_fault = None
        try:
            row = next(rows, None)
        except csv.Error as error:
            message = f"is not valid CSV: {error}"
            row, syntax_fault = [], Fault(line=line, field=None, message=message)
        for fault in faults:
            yield line, fault
        faults.clear()
        if syntax_fault is not None:
            yield line, syntax_fault
            if rows.line_num > line:  # an unclosed quote has consumed the lines that follow
                return
        if row is None:
            return
        if row:
            yield line, row


def _decoded(path: Path, faults: list[Fault]) -> Iterator[str]:
    """Yield lines for the CSV parser, which counts them; one with a fault is yielded as an empty line."""
    for _, line in _text_lines(path):
        if isinstance(line, Fault):
            faults.append(line)
            yield "\n"
        else:
            yield line


def _text_lines(path: Path) -> Iterator[tuple[int, str | Fault]]:
    """Yield (line number from 1, the line with its terminator or a fault)."""
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
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH_ROWS, columns=wanted):
                yield from _batch_records(batch, first_row)
                first_row += batch.num_rows
    except MemoryError:  # ArrowMemoryError is an ArrowException too
        raise
    except (
        pa.ArrowException,
        ValueError,
        OSError,
    ) as error:  # ValueError: column names that are not UTF-8
        if isinstance(error, OSError) and error.errno is not None:
            raise  # an error of the disk, not of the file
        message = f"is not a readable Parquet file: {str(error).splitlines()[0][:300]}"
        yield Fault(line=None, field=None, message=message)


def _parquet_fault(file: pq.ParquetFile, columns: list[str]) -> Fault | None:
    names = file.schema_arrow.names
    repeated = [name for name in columns if names.count(name) > 1]
    if repeated:
        return Fault(line=None, field=repeated[0], message="there are two columns with this name")
    if columns[0] not in names:
        return _missing_column_fault(columns[0], names, line=None)
    if file.metadata.num_rows > MAX_PARQUET_ROWS:
        return Fault(line=None, field=None, message=f"has more than {MAX_PARQUET_ROWS:,} rows")
    groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
    if sum(group.total_byte_size for group in groups) > MAX_UNCOMPRESSED_BYTES:
        message = f"decompresses to more than {MAX_UNCOMPRESSED_BYTES:,} bytes"
        return Fault(line=None, field=None, message=message)
    return None


def _batch_records(batch: pa.RecordBatch, first_row: int) -> Iterator[Record | Fault]:
    try:
        rows = batch.to_pylist()
    except ValueError:  # some text is not UTF-8: find the rows
        for offset in range(batch.num_rows):
            try:
                row = batch.slice(offset, 1).to_pylist()[0]
            except ValueError:
                message = "contains text that is not UTF-8"
                yield Fault(line=first_row + offset, field=None, message=message)
            else:
                yield Record(first_row + offset, row)
        return
    for offset, row in enumerate(rows):
        yield Record(first_row + offset, row)


def _missing_column_fault(name: str, columns: list[str], *, line: int | None) -> Fault:
    listed = ", ".join(repr(column[:80]) for column in columns[:20])
    return Fault(line=line, field=name, message=f"no such column; the file has {listed}")
