"""Shows how an upload would be read, without storing anything."""

from __future__ import annotations

import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from services.shared.datasets.card import Split
from services.shared.datasets.formats.records import Record
from services.shared.datasets.formats.source import DetectedLayout, Source, open_source
from services.shared.datasets.ingest import unpacking_dir
from services.shared.datasets.profile import Profile, profile_source
from services.shared.datasets.row_parser import RowParser
from services.shared.datasets.text import TextKind
from services.shared.datasets.upload import DatasetRejected, Fault, Format, HeadColumn, Layout
from services.shared.datasets.validator import examine, parser_warnings

MAX_EXAMINED_ROWS = 100_000
_SHOWN_ROWS = 5
_SHOWN_LABELS = 50
_SHOWN_CHARACTERS = 200
_SHOWN_COLUMNS = 30


class Preview(BaseModel):
    """How an upload would be read, and what should be declared or corrected first."""

    detected: DetectedLayout
    found: str  # `detected` in one line
    text_column: str
    text_pair_column: str | None
    text_kind: TextKind
    heads: list[HeadColumn]
    split_column: str | None
    first_rows: list[dict[str, str]]  # as strings, cut to 200 characters
    examined_rows: int
    complete: bool  # whether all rows were examined, not only the first 100,000
    rows: dict[Split, int]
    label_counts: dict[str, dict[str, int]]  # of the 50 most frequent labels
    missing_labels: dict[str, int]
    num_duplicates: int  # rows that would be dropped
    num_left_out: int  # rows that annotators did not accept, and faulty rows that are skipped
    acceptable: bool  # whether the upload would be stored with the options of `command`
    faults: list[Fault]
    total_faults: int
    warnings: list[str]
    command: str


def preview(
    upload: Path, *, format: Format | None = None, layout: Layout, filename: str = "FILE"
) -> Preview:
    """Examine an upload with the declared options, completed by what its columns suggest.

    Raises DatasetRejected where nothing of the upload can be read, and OSError.
    """
    work_dir = unpacking_dir(upload)
    try:
        source = open_source(upload, layout, format=format, work_dir=work_dir)
        profile = profile_source(source, layout)
        if profile.suggested.header is not layout.header:  # other columns: open it as suggested
            source = open_source(upload, profile.suggested, format=format, work_dir=work_dir)
            profile = profile_source(source, profile.suggested)
        return _examine(source, profile, filename=filename)
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)


def _examine(source: Source, profile: Profile, *, filename: str) -> Preview:
    layout = profile.suggested
    first_rows = [
        {name: _shown(value) for name, value in list(item.fields.items())[:_SHOWN_COLUMNS]}
        for item in islice(source.records(None), _SHOWN_ROWS)
        if isinstance(item, Record)
    ]
    parser = RowParser(layout, source.detected.class_names)
    records = source.records(layout.columns())
    validator = examine(islice(records, MAX_EXAMINED_ROWS), layout, parser)
    complete = next(records, None) is None
    text_kind = parser.text_kind or TextKind.SINGLE
    warnings = [*source.detected.notes, *profile.warnings]
    counts: dict[str, dict[str, int]] = {}
    for head, classes in zip(layout.heads, validator.classes, strict=True):
        frequent = sorted(classes, key=lambda label: -classes[label].total)[:_SHOWN_LABELS]
        counts[head.name] = {label: classes[label].total for label in frequent}
        if len(classes) > _SHOWN_LABELS:
            warnings.append(f"{head.name}: {len(classes):,} labels, of which 50 are counted here")
    try:
        warnings += validator.summarize(text_kind).warnings
        rejected = None
    except DatasetRejected as error:
        rejected = error
    warnings += parser_warnings(parser, layout)
    if not complete:
        warnings.append(f"only the first {MAX_EXAMINED_ROWS:,} rows were examined")
    return Preview(
        detected=source.detected,
        found=source.detected.describe(),
        text_column=layout.text_column,
        text_pair_column=layout.text_pair_column,
        text_kind=text_kind,
        heads=layout.heads,
        split_column=layout.split_column,
        first_rows=first_rows,
        examined_rows=sum(validator.rows.values()) + len(validator.duplicate_lines),
        complete=complete,
        rows={split: validator.rows[split] for split in Split},
        label_counts=counts,
        missing_labels={
            head.name: missing
            for head, missing in zip(layout.heads, validator.missing, strict=True)
        },
        num_duplicates=len(validator.duplicate_lines),
        num_left_out=source.num_left_out + validator.num_skipped,
        acceptable=rejected is None,
        faults=rejected.faults if rejected else [],
        total_faults=rejected.total if rejected else 0,
        warnings=warnings,
        command=profile.command(filename),
    )


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return value[:_SHOWN_CHARACTERS]
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, RecursionError):
        text = str(type(value).__name__)
    return text[:_SHOWN_CHARACTERS].encode("utf-8", "replace").decode()
