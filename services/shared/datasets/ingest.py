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
from services.shared.datasets.formats.records import Record, missing_column_fault
from services.shared.datasets.formats.source import Source, open_source
from services.shared.datasets.profile import Profile, profile_source
from services.shared.datasets.row_parser import Labels, Row, RowParser
from services.shared.datasets.split import assign_split, text_key
from services.shared.datasets.stored_card import write_card
from services.shared.datasets.text import TextKind, to_columns
from services.shared.datasets.upload import DatasetRejected, Fault, Format, Layout
from services.shared.datasets.validator import DatasetSummary, validate
from services.shared.files.atomic_write import partial_path, sync
from services.shared.files.hashing import file_sha256

_ROWS_PER_GROUP = 8192


def ingest(
    upload: Path,
    *,
    format: Format | None = None,
    layout: Layout,
    id: str,
    name: str,
    datasets_dir: Path,
    filename: str = "FILE",
) -> DatasetCard:
    """Validate an upload, store it as `datasets_dir`/`id` and return its card.

    The dataset appears completely or not at all. `filename` is for the command in a refusal. Raises
    DatasetRejected with the faults of the upload, and OSError from the disk.
    """
    work_dir = unpacking_dir(upload)
    try:
        source = open_source(upload, layout, format=format, work_dir=work_dir)
        profile = profile_source(source, layout)
        summary = _validate(source, profile, layout, filename=filename)
        card = DatasetCard(
            id=id,
            name=name,
            text_kind=summary.text_kind,
            heads=summary.heads,
            rows=summary.rows,
            label_counts=summary.label_counts,
            missing_labels=summary.missing_labels,
            warnings=summary.warnings,
            sha256=file_sha256(upload),
        )
        _store(source, card, layout=layout, summary=summary, datasets_dir=datasets_dir)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    return card


def unpacking_dir(upload: Path) -> Path:
    """Return the directory next to an upload that its archives are unpacked to."""
    return upload.with_name(f"{upload.name}.unpacked")


def _validate(source: Source, profile: Profile, layout: Layout, *, filename: str) -> DatasetSummary:
    parser = RowParser(layout, source.detected.class_names)
    columns = source.detected.columns
    is_json = source.detected.format in (Format.JSON, Format.JSONL)
    try:
        required = [layout.text_column] if is_json else []  # a reader of tables checks it itself
        required += [name for name in (layout.text_pair_column, layout.split_column) if name]
        for name in required:
            if columns and name not in columns:
                raise DatasetRejected([missing_column_fault(name, columns, line=None)], 1)
        summary = validate(source.records(layout.columns()), layout, parser)
    except DatasetRejected as rejected:
        raise DatasetRejected(
            rejected.faults,
            rejected.total,
            found=source.detected.describe(),
            command=profile.command(filename),
        ) from rejected
    summary.warnings = [*source.detected.notes, *summary.warnings, *profile.warnings]
    if source.num_left_out:
        summary.warnings.append(
            f"{source.num_left_out} rows that the annotators did not accept were left out"
        )
    return summary


def _store(
    source: Source,
    card: DatasetCard,
    *,
    layout: Layout,
    summary: DatasetSummary,
    datasets_dir: Path,
) -> None:
    staging = partial_path(datasets_dir / card.id)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        _write_splits(
            source.records(layout.columns()),
            staging,
            layout=layout,
            summary=summary,
            parser=RowParser(layout, source.detected.class_names),
        )
        write_card(staging, card)
        for path in [*staging.iterdir(), staging]:
            sync(path)
        staging.rename(datasets_dir / card.id)
        sync(datasets_dir)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _write_splits(
    records: Iterable[Record | Fault],
    directory: Path,
    *,
    layout: Layout,
    summary: DatasetSummary,
    parser: RowParser,
) -> None:
    heads = summary.heads
    class_indices = [{label: index for index, label in enumerate(head.labels)} for head in heads]
    writers = {
        split: _SplitWriter(directory / f"{split}.parquet", heads, kind=summary.text_kind)
        for split in Split
    }
    with writers[Split.TRAIN], writers[Split.VALIDATION], writers[Split.TEST]:
        for record in records:
            if isinstance(record, Fault):
                assert summary.num_skipped, "validation has rejected uploads with faults"
                continue
            row = parser.parse(record)
            if record.line in summary.duplicate_lines:
                continue
            if not isinstance(row, Row):
                assert summary.num_skipped, "validation has rejected uploads with faults"
                continue
            split = row.split or assign_split(text_key(row.text), layout.fractions)
            writers[summary.moved_lines.get(row.line, split)].add(row, class_indices)


class _SplitWriter:
    """Writes the rows of one split in row groups; a split without rows becomes an empty file."""

    def __init__(self, path: Path, heads: list[Head], *, kind: TextKind) -> None:
        self._is_pair = kind is TextKind.PAIR
        columns = [("text", pa.string())]
        columns += [("text_pair", pa.string())] if self._is_pair else []
        columns += [("line", pa.int64()), *((head.name, _column_type(head)) for head in heads)]
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
        text, text_pair = to_columns(row.text)
        texts = [text, text_pair] if self._is_pair else [text]
        for column, value in zip(self._columns, [*texts, row.line, *labels], strict=True):
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
