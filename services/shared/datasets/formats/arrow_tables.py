"""Parquet and Arrow files, with the names of ClassLabel features in their metadata."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from services.shared.datasets.formats.records import (
    MAX_COLUMNS,
    MAX_ROWS,
    MAX_UNCOMPRESSED_BYTES,
    Record,
    file_fault,
    missing_column_fault,
)
from services.shared.datasets.upload import Fault

_BATCH_ROWS = 128  # 128 MB of the longest texts
_INDEX_COLUMN = "__index_level_0__"  # of pandas
_CLASS_LABEL_METADATA = b"huggingface"


def read_parquet(path: Path, *, columns: list[str] | None) -> Iterator[Record | Fault]:
    """Yield the rows of a Parquet file; `columns` are those needed, the text column first (None: all)."""
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            fault = _table_fault(names, columns) or _parquet_size_fault(file)
            if fault is not None:
                yield fault
                return
            wanted = [name for name in columns or names if name in names]
            first_row = 1
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=wanted):
                yield from _batch_records(batch, first_row)
                first_row += batch.num_rows
    except MemoryError:  # ArrowMemoryError is an ArrowException too
        raise
    except (pa.ArrowException, ValueError, OSError) as error:  # ValueError: names not UTF-8
        yield _unreadable(error, "Parquet")


def read_arrow(path: Path, *, columns: list[str] | None) -> Iterator[Record | Fault]:
    """Yield the rows of an Arrow IPC file or stream, such as those of `save_to_disk`."""
    try:
        with pa.OSFile(str(path)) as source:
            reader = _open_arrow(source)
            names = reader.schema.names
            fault = _table_fault(names, columns)
            if fault is not None:
                yield fault
                return
            wanted = [name for name in columns or names if name in names]
            first_row = 1
            for batch in _arrow_batches(reader):
                if first_row > MAX_ROWS:
                    yield file_fault(f"has more than {MAX_ROWS:,} rows")
                    return
                for start in range(0, batch.num_rows, _BATCH_ROWS):
                    part = batch.slice(start, _BATCH_ROWS).select(wanted)
                    yield from _batch_records(part, first_row)
                    first_row += part.num_rows
    except MemoryError:
        raise
    except (pa.ArrowException, ValueError, OSError) as error:
        yield _unreadable(error, "Arrow")


def parquet_schema(path: Path) -> pa.Schema | None:
    """Return the schema of a Parquet file, or None where it cannot be read."""
    try:
        with pq.ParquetFile(path) as file:
            return file.schema_arrow
    except (pa.ArrowException, ValueError, OSError):
        return None


def arrow_schema(path: Path) -> pa.Schema | None:
    """Return the schema of an Arrow file, or None where it cannot be read."""
    try:
        with pa.OSFile(str(path)) as source:
            return _open_arrow(source).schema
    except (pa.ArrowException, ValueError, OSError):
        return None


def class_label_names(schema: pa.Schema) -> dict[str, list[str]]:
    """Return the names of the ClassLabel features that Hugging Face datasets store in the metadata."""
    raw = (schema.metadata or {}).get(_CLASS_LABEL_METADATA)
    if raw is None:
        return {}
    try:
        features = json.loads(raw)["info"]["features"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return class_label_features(features)


def class_label_features(features: Any) -> dict[str, list[str]]:
    """Return the names of ClassLabel features, also within sequences, in a `features` object."""
    found: dict[str, list[str]] = {}
    for column, feature in features.items() if isinstance(features, dict) else ():
        inner = feature
        for _ in range(2):
            if isinstance(inner, dict) and isinstance(inner.get("feature"), dict):
                inner = inner["feature"]
            elif isinstance(inner, list) and len(inner) == 1:
                inner = inner[0]
        names = inner.get("names") if isinstance(inner, dict) else None
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            found[column] = names
    return found


def visible_columns(schema: pa.Schema) -> list[str]:
    """Return the columns without the index that pandas stores."""
    return [name for name in schema.names if name != _INDEX_COLUMN]


def _open_arrow(source: pa.NativeFile) -> Any:
    try:
        return pa.ipc.open_file(source)
    except pa.ArrowInvalid:
        source.seek(0)
        return pa.ipc.open_stream(source)


def _arrow_batches(reader: Any) -> Iterator[pa.RecordBatch]:
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for number in range(reader.num_record_batches):
            yield reader.get_batch(number)
    else:
        yield from reader


def _table_fault(names: list[str], columns: list[str] | None) -> Fault | None:
    if len(names) > MAX_COLUMNS:
        return file_fault(f"has {len(names):,} columns; at most {MAX_COLUMNS:,} are read")
    counts = Counter(names)
    repeated = [name for name in columns or names if counts[name] > 1]
    if repeated:
        return Fault(line=None, field=repeated[0], message="there are two columns with this name")
    if columns and columns[0] not in names:
        return missing_column_fault(columns[0], names, line=None)
    return None


def _parquet_size_fault(file: pq.ParquetFile) -> Fault | None:
    if file.metadata.num_rows > MAX_ROWS:
        return file_fault(f"has more than {MAX_ROWS:,} rows")
    groups = [file.metadata.row_group(n) for n in range(file.metadata.num_row_groups)]
    if sum(group.total_byte_size for group in groups) > MAX_UNCOMPRESSED_BYTES:
        return file_fault(f"decompresses to more than {MAX_UNCOMPRESSED_BYTES:,} bytes")
    return None


def _unreadable(error: Exception, kind: str) -> Fault:
    if isinstance(error, OSError) and error.errno is not None:
        raise error  # an error of the disk, not of the file
    reason = (str(error).splitlines() or [type(error).__name__])[0][:300]
    return file_fault(f"is not a readable {kind} file: {reason}")


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
