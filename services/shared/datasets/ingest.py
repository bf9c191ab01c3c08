"""Ingests an upload: validates it in a first pass, and stores it atomically in a second."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from services.shared.datasets.card import DatasetCard, Head, HeadType, Split
from services.shared.datasets.reader import Record, read_records
from services.shared.datasets.row_parser import Labels, Row, parse_row
from services.shared.datasets.split import assign_split, text_key
from services.shared.datasets.upload import Fault, Format, Layout
from services.shared.datasets.validator import validate
from services.shared.files.atomic_write import partial_path, sync
from services.shared.files.hashing import file_sha256

CARD_FILE = "dataset.json"
_ROWS_PER_GROUP = 8192


def ingest(
    upload: Path, *, format: Format, layout: Layout, id: str, name: str, datasets_dir: Path
) -> DatasetCard:
    """Validate an upload, store it as `datasets_dir`/`id` and return its card.

    The dataset appears completely or not at all. Raises DatasetRejected with the faults of the
    upload, and OSError from the disk.
    """
    columns = layout.columns()
    summary = validate(read_records(upload, format=format, columns=columns), layout)
    card = DatasetCard(
        id=id,
        name=name,
        heads=summary.heads,
        rows=summary.rows,
        label_counts=summary.label_counts,
        missing_labels=summary.missing_labels,
        warnings=summary.warnings,
        sha256=file_sha256(upload),
    )
    staging = partial_path(datasets_dir / id)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        _write_splits(
            read_records(upload, format=format, columns=columns),
            staging,
            layout=layout,
            heads=summary.heads,
            duplicate_lines=summary.duplicate_lines,
        )
        (staging / CARD_FILE).write_text(card.model_dump_json(indent=2), encoding="utf-8")
        for path in [*staging.iterdir(), staging]:
            sync(path)
        staging.rename(datasets_dir / id)
        sync(datasets_dir)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    return card


def read_card(dataset_dir: Path) -> DatasetCard:
    """Return the card of a stored dataset; raises OSError and pydantic's ValidationError."""
    return DatasetCard.model_validate_json((dataset_dir / CARD_FILE).read_bytes())


def _write_splits(
    records: Iterable[Record | Fault],
    directory: Path,
    *,
    layout: Layout,
    heads: list[Head],
    duplicate_lines: set[int],
) -> None:
    class_indices = [{label: index for index, label in enumerate(head.labels)} for head in heads]
    writers = {split: _SplitWriter(directory / f"{split}.parquet", heads) for split in Split}
    with writers[Split.TRAIN], writers[Split.VALIDATION], writers[Split.TEST]:
        for record in records:
            assert isinstance(record, Record), "validation has rejected uploads with faults"
            if record.line in duplicate_lines:
                continue
            row = parse_row(record, layout)
            assert isinstance(row, Row)
            split = assign_split(text_key(row.text), layout.fractions)
            writers[split].add(row, class_indices)


class _SplitWriter:
    """Writes the rows of one split in row groups; a split without rows becomes an empty file."""

    def __init__(self, path: Path, heads: list[Head]) -> None:
        columns = [("text", pa.string()), ("line", pa.int64())]
        columns += [(head.name, _column_type(head)) for head in heads]
        self._heads = heads
        self._schema = pa.schema(columns)
        self._writer = pq.ParquetWriter(path, self._schema, compression="zstd")
        self._columns: list[list[Any]] = [[] for _ in columns]

    def __enter__(self) -> _SplitWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self._flush()
        self._writer.close()

    def add(self, row: Row, class_indices: list[dict[str, int]]) -> None:
        """Append a row; `class_indices` maps the labels of each head to their indices."""
        labels = [
            _encode_labels(head, value, indices)
            for head, value, indices in zip(self._heads, row.labels, class_indices, strict=True)
        ]
        for column, value in zip(self._columns, [row.text, row.line, *labels], strict=True):
            column.append(value)
        if len(self._columns[0]) == _ROWS_PER_GROUP:
            self._flush()

    def _flush(self) -> None:
        if not self._columns[0]:
            return
        arrays = [
            pa.array(column, type=field.type)
            for column, field in zip(self._columns, self._schema, strict=True)
        ]
        self._writer.write_batch(pa.record_batch(arrays, schema=self._schema))
        for column in self._columns:
            column.clear()


def _column_type(head: Head) -> pa.DataType:
    return pa.int32() if head.type is HeadType.SINGLE_LABEL else pa.list_(pa.int32())


def _encode_labels(
    head: Head, labels: Labels | None, class_indices: dict[str, int]
) -> int | list[int] | None:
    if labels is None:
        return None
    indices = sorted(class_indices[label] for label in labels)
    return indices[0] if head.type is HeadType.SINGLE_LABEL else indices
