"""Opens an upload by its content: what it is, how it is encoded, and an iterator over its rows."""

from __future__ import annotations

import csv
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from services.shared.datasets.formats.arrow_tables import (
    arrow_schema,
    class_label_names,
    parquet_schema,
    read_arrow,
    read_parquet,
    visible_columns,
)
from services.shared.datasets.formats.compression import decompress, unzip
from services.shared.datasets.formats.delimited import (
    FASTTEXT_LABELS,
    FASTTEXT_PREFIX,
    delimited_rows,
    read_delimited,
    read_fasttext,
)
from services.shared.datasets.formats.encoding import detect_encoding
from services.shared.datasets.formats.exports import (
    Disagreement,
    Export,
    LeftOut,
    detect_export,
    flatten,
)
from services.shared.datasets.formats.folders import (
    Member,
    is_class_folders,
    list_members,
    read_class_folders,
    saved_class_names,
)
from services.shared.datasets.formats.json_lines import read_json_document, read_json_lines
from services.shared.datasets.formats.records import Record, file_fault
from services.shared.datasets.formats.spreadsheet import read_xlsx, sheet_names, xlsx_rows
from services.shared.datasets.upload import DatasetRejected, Fault, Format, Layout

_SAMPLE_BYTES = 2**16
_SAMPLE_ROWS = 50
_MAX_NESTING = 3  # an archive in an archive
_CONTROL_BYTES = bytes(set(range(32)) - {9, 10, 12, 13, 27})
_MIN_TEXT_SHARE = 0.9  # of the bytes of a text file that are no control characters
_DELIMITERS = (",", "\t", ";", "|", "_!_")
_NUMBERED_COLUMN = re.compile(r"^column\d+$")
_NESTED_KEYS = ("messages", "conversations", "annotations", "completions", "spans", "options")
_TABLES = (
    ".jsonl",
    ".ndjson",
    ".json",
    ".csv",
    ".tsv",
    ".txt",
    ".parquet",
    ".arrow",
    ".feather",
    ".xlsx",
    ".gz",
    ".zst",
)
_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"PK\x03\x04", "zip"),
    (b"PAR1", "parquet"),
    (b"ARROW1\x00\x00", "arrow"),
    (b"\xff\xff\xff\xff", "arrow"),
)
_UNSUPPORTED = (
    (b"\xd0\xcf\x11\xe0", "an old Excel workbook (.xls); save it as .xlsx or CSV"),
    (b"BZh", "compressed with bzip2; send it uncompressed, or as gzip, zip or zstd"),
    (b"\xfd7zXZ", "compressed with xz; send it uncompressed, or as gzip, zip or zstd"),
    (b"7z\xbc\xaf", "a 7z archive; send it as zip"),
    (b"Rar!", "a RAR archive; send it as zip"),
    (b"%PDF", "a PDF document; extract its text into CSV or JSON lines"),
    (b"SQLite format 3", "an SQLite database; export the table as CSV"),
    (b"FEA1", "a Feather file of version 1; save it as Parquet"),
)


class DetectedLayout(BaseModel):
    """What was found in an upload."""

    model_config = ConfigDict(frozen=True)

    format: Format
    compression: list[str] = []
    encoding: str | None = None  # None: the format states it
    delimiter: str | None = None
    header: bool | None = None  # None: not a table in text
    columns: list[str] = []
    index_column: str | None = None
    export: Export | None = None
    class_names: dict[str, list[str]] = {}
    files: list[str] = []  # of an archive
    notes: list[str] = []

    def describe(self) -> str:
        """Return one line that names everything that was found."""
        parts = [" in ".join([str(self.format), *reversed(self.compression)])]
        if self.export:
            parts.append(f"an export of {self.export}")
        if self.encoding:
            parts.append(f"encoding {self.encoding}")
        if self.delimiter:
            parts.append(f"delimiter {self.delimiter!r}")
        if self.header is not None:
            parts.append("with a header" if self.header else "without a header")
        if self.columns:
            listed = ", ".join(repr(name[:80]) for name in self.columns[:20])
            parts.append(f"columns {listed}" + (", ..." if len(self.columns) > 20 else ""))
        return ", ".join(parts)


@dataclass
class Source:
    """An opened upload: `records` may be called more than once."""

    detected: DetectedLayout
    read: Callable[[list[str] | None], Iterator[Record | Fault]]
    parts: list[Source] = field(default_factory=list)  # the files of an archive
    _num_left_out: int = 0

    @property
    def num_left_out(self) -> int:
        """Return the number of rows without a decision of the annotators in the last call of `records`."""
        return self._num_left_out + sum(part.num_left_out for part in self.parts)

    def records(self, columns: list[str] | None = None) -> Iterator[Record | Fault]:
        """Yield every row, or a fault in its place, in the order of the file.

        `columns` are those needed, the text column first; formats of rows yield others too.
        """
        self._num_left_out = 0
        export = self.detected.export
        for item in self.read(None if export else columns):
            if export is None or isinstance(item, Fault):
                yield item
                continue
            try:
                yield replace(item, fields=flatten(item.fields, export))
            except LeftOut:
                self._num_left_out += 1
            except Disagreement as error:
                yield Fault(line=item.line, field=None, message=str(error))


def open_source(
    path: Path, layout: Layout, *, format: Format | None, work_dir: Path, depth: int = 0
) -> Source:
    """Detect what an upload holds. Raises DatasetRejected where it cannot be read, and OSError.

    `format` is what the user states; compression, encoding and delimiter are detected in any case.
    Archives are unpacked below `work_dir`, which the caller removes.
    """
    kind = format if format in (Format.PARQUET, Format.ARROW, Format.XLSX) else binary_kind(path)
    if kind in ("gzip", "zstd"):
        _check_depth(depth)
        work_dir.mkdir(parents=True, exist_ok=True)
        unpacked = work_dir / f"unpacked-{depth}"
        decompress(path, unpacked, kind=kind)
        source = open_source(unpacked, layout, format=format, work_dir=work_dir, depth=depth + 1)
        return _compressed(source, kind)
    if kind == "zip":
        _check_depth(depth)
        directory = work_dir / f"archive-{depth}"
        directory.mkdir(parents=True)
        unzip(path, directory)
        return _open_archive(directory, layout, format=format, work_dir=work_dir, depth=depth)
    if kind == Format.PARQUET:
        return _open_table(path, Format.PARQUET)
    if kind == Format.ARROW:
        return _open_table(path, Format.ARROW)
    if kind == Format.XLSX:
        return _open_xlsx(path, layout)
    return _open_text(path, layout, format=format)


def _check_depth(depth: int) -> None:
    if depth >= _MAX_NESTING:
        raise _rejected("holds archives within archives; send the file itself")


def binary_kind(path: Path) -> str | None:
    """Return the kind of a binary file, or None for text. Raises DatasetRejected for unsupported ones."""
    with path.open("rb") as file:
        start = file.read(_SAMPLE_BYTES)
    for magic, advice in _UNSUPPORTED:
        if start.startswith(magic):
            raise _rejected(f"is {advice}")
    for magic, kind in _MAGIC:
        if start.startswith(magic):
            return _zip_kind(path) if kind == "zip" else kind
    return None


def _zip_kind(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            return "xlsx" if "xl/workbook.xml" in archive.namelist() else "zip"
    except zipfile.BadZipFile:
        return "zip"


def _compressed(source: Source, kind: str) -> Source:
    compression = [kind, *source.detected.compression]
    return replace(source, detected=source.detected.model_copy(update={"compression": compression}))


def _open_table(path: Path, format: Format) -> Source:
    schema = parquet_schema(path) if format is Format.PARQUET else arrow_schema(path)
    columns = [] if schema is None else visible_columns(schema)
    detected = DetectedLayout(
        format=format,
        columns=columns,
        class_names={} if schema is None else class_label_names(schema),
    )
    reader = read_parquet if format is Format.PARQUET else read_arrow
    source = Source(detected, lambda wanted: reader(path, columns=wanted))
    return _with_export(source)


def _open_xlsx(path: Path, layout: Layout) -> Source:
    first = next(xlsx_rows(path), None)
    notes = []
    sheets = sheet_names(path)
    if len(sheets) > 1:
        notes.append(
            f"only the first sheet, {sheets[0]!r}, was read, not {', '.join(map(repr, sheets[1:6]))}"
        )
    cells = [] if first is None or isinstance(first[1], Fault) else first[1]
    names = ["" if cell is None else str(cell) for cell in cells]
    header, columns = _columns(names, layout)
    detected = DetectedLayout(
        format=Format.XLSX,
        header=header,
        columns=columns,
        index_column=_index_column(columns),
        notes=notes,
    )
    given = None if header else columns
    return Source(
        detected,
        lambda wanted: read_xlsx(path, header=given, required=(wanted or [])[:1]),
    )


def _open_text(path: Path, layout: Layout, *, format: Format | None) -> Source:
    encoding, notes = _encoding(path, layout)
    sample = _decoded_sample(path, encoding)
    if format is None:
        format = _text_format(sample)
    detected = DetectedLayout(format=format, encoding=encoding, notes=notes)
    if format is Format.JSON:
        source = Source(detected, lambda _: read_json_document(path, encoding=encoding))
        return _with_export(_with_keys(source))
    if format is Format.JSONL:
        source = Source(detected, lambda _: read_json_lines(path, encoding=encoding))
        return _with_export(_with_keys(source))
    if format is Format.FASTTEXT:
        columns = ["text", FASTTEXT_LABELS]
        detected = detected.model_copy(update={"columns": columns})
        return Source(detected, lambda _: read_fasttext(path, encoding=encoding))
    if format is Format.FOLDER:
        raise _rejected("is no archive; send the folders as a zip archive")
    return _open_delimited(path, layout, detected, sample)


def _open_delimited(path: Path, layout: Layout, detected: DetectedLayout, sample: str) -> Source:
    encoding = detected.encoding or "utf-8"
    delimiter = layout.delimiter or _delimiter(sample, layout)
    rows = delimited_rows(path, encoding=encoding, delimiter=delimiter, quotes=layout.quotes)
    first = next((row for _, row in rows if not isinstance(row, Fault)), [])
    header, columns = _columns(first, layout)
    detected = detected.model_copy(
        update={
            "delimiter": delimiter,
            "header": header,
            "columns": columns,
            "index_column": _index_column(columns),
        }
    )
    names = None if header else columns
    return _with_export(
        Source(
            detected,
            lambda wanted: read_delimited(
                path,
                encoding=encoding,
                delimiter=delimiter,
                header=names,
                required=(wanted or [])[:1],
                quotes=layout.quotes,
            ),
        )
    )


def _open_archive(
    directory: Path, layout: Layout, *, format: Format | None, work_dir: Path, depth: int
) -> Source:
    members = list_members(directory)
    if not members:
        raise _rejected("the archive holds no files")
    class_names = saved_class_names(directory)
    if class_names or any(m.path.name == "state.json" for m in members):
        members = [member for member in members if member.name.endswith(".arrow")]
    elif format in (None, Format.FOLDER) and is_class_folders(members):
        return Source(
            DetectedLayout(
                format=Format.FOLDER,
                compression=["zip"],
                columns=["text", "label"],
                files=[member.name for member in members[:20]],
            ),
            lambda _: read_class_folders(members, encoding=layout.encoding),
        )
    tables = [member for member in members if member.path.suffix.lower() in _TABLES]
    if not tables:
        listed = ", ".join(repr(member.name[:80]) for member in members[:10])
        raise _rejected(f"the archive holds no table that can be read: {listed}")
    if len(tables) > 1 and any(table.split is None for table in tables):
        listed = ", ".join(repr(table.name[:80]) for table in tables[:10])
        raise _rejected(
            f"the archive holds {len(tables)} tables, {listed}; name them train, validation and test, or "
            "send one"
        )
    sources = [
        open_source(
            table.path,
            layout,
            format=format,
            work_dir=work_dir / f"member-{depth}-{number}",
            depth=depth + 1,
        )
        for number, table in enumerate(tables)
    ]
    return _joined(tables, sources, class_names)


def _joined(
    tables: list[Member], sources: list[Source], class_names: dict[str, list[str]]
) -> Source:
    """Return the rows of several files in sequence; lines are counted through all of them."""
    first = sources[0].detected
    notes = list(dict.fromkeys(note for source in sources for note in source.detected.notes))
    if len(tables) > 1:
        listed = ", ".join(f"{table.name} ({table.split})" for table in tables[:10])
        notes.append(f"the splits are those of the files, in this order: {listed}")
    detected = first.model_copy(
        update={
            "compression": ["zip", *first.compression],
            "class_names": class_names or first.class_names,
            "files": [table.name for table in tables[:20]],
            "notes": notes,
        }
    )

    def read(columns: list[str] | None) -> Iterator[Record | Fault]:
        offset = 0
        for table, source in zip(tables, sources, strict=True):
            last = 0
            for item in source.records(columns):
                if item.line is not None:
                    last = max(last, item.line)
                line = None if item.line is None else item.line + offset
                if isinstance(item, Fault):
                    yield item.model_copy(update={"line": line})
                else:
                    split = table.split if len(tables) > 1 else None
                    yield Record(item.line + offset, item.fields, split)
            offset += last

    return Source(detected.model_copy(update={"export": None}), read, parts=sources)


def _with_keys(source: Source) -> Source:
    """Name the keys of the first rows as the columns."""
    keys: dict[str, None] = {}
    sample = [r for r in islice(source.read(None), _SAMPLE_ROWS) if isinstance(r, Record)]
    for record in sample:
        keys.update(dict.fromkeys(record.fields))
    if len(sample) == 1:
        _check_wrapped(sample[0].fields)
    return replace(source, detected=source.detected.model_copy(update={"columns": list(keys)}))


def _check_wrapped(fields: dict[str, Any]) -> None:
    """Refuse one object that holds the rows, or the columns, of a table."""
    for key, value in fields.items():
        is_table = isinstance(value, list) and len(value) > 2
        if not is_table or key in _NESTED_KEYS or not all(isinstance(v, dict) for v in value):
            continue
        raise _rejected(
            f"is one object, whose key {key[:80]!r} holds {len(value):,} rows; send that array itself, for "
            f"example by jq '.{key[:80]}'"
        )
    values = list(fields.values())
    if len(values) > 1 and all(isinstance(v, dict | list) and len(v) > 2 for v in values):
        raise _rejected(
            "is one object of columns; send one object a row, for example by pandas' "
            "to_json(orient='records', lines=True)"
        )


def _with_export(source: Source) -> Source:
    """Recognise the export of an annotation tool; its columns are those after flattening."""
    rows = [r.fields for r in islice(source.read(None), _SAMPLE_ROWS) if isinstance(r, Record)]
    export = detect_export(rows)
    if export is None:
        return source
    columns: dict[str, None] = {}
    for row in rows:
        try:
            columns.update(dict.fromkeys(flatten(row, export)))
        except (LeftOut, Disagreement):
            continue
    update = {"export": export, "columns": list(columns)}
    return replace(source, detected=source.detected.model_copy(update=update))


def _encoding(path: Path, layout: Layout) -> tuple[str, list[str]]:
    if layout.encoding is not None:
        return layout.encoding, []
    found = detect_encoding(path)
    if found.alternatives:
        names = " or ".join([found.name, *found.alternatives])
        raise _rejected(
            f"is not UTF-8, and its encoding is ambiguous: {names}; give the encoding (--encoding)"
        )
    if found.name == "utf-8":
        with path.open("rb") as file:
            start = file.read(_SAMPLE_BYTES)
        if len(start.translate(None, _CONTROL_BYTES)) < len(start) * _MIN_TEXT_SHARE:
            raise _rejected("is a binary file of an unknown format")
        return found.name, []
    note = f"the text was read as {found.name}; if it looks wrong, give the encoding (--encoding)"
    return found.name, [note]


def _decoded_sample(path: Path, encoding: str) -> str:
    with path.open("rb") as file:
        raw = file.read(_SAMPLE_BYTES)
    text = raw.decode(encoding, errors="replace").removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _text_format(sample: str) -> Format:
    start = sample.lstrip()
    line = start.split("\n", 1)[0].strip()
    if start.startswith(("[", "{")):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            if re.match(r"\[\s*(\{|\]|$)", start) or re.match(r"\{\s*(\"|$)", start):
                complete = line.endswith("}") or len(line) > _SAMPLE_BYTES // 2
                return Format.JSONL if start[0] == "{" and complete else Format.JSON
        else:
            rows = isinstance(value, list) and all(isinstance(item, dict) for item in value)
            return Format.JSON if rows else Format.JSONL
    lines = [text for text in start.split("\n")[:_SAMPLE_ROWS] if text.strip()]
    if lines and sum(text.startswith(FASTTEXT_PREFIX) for text in lines) > len(lines) * 0.8:
        return Format.FASTTEXT
    return Format.CSV


def _delimiter(sample: str, layout: Layout) -> str:
    """Return the delimiter under which the first row names the text column, or else the rows agree."""
    parsed = {delimiter: _sample_rows(sample, delimiter) for delimiter in _DELIMITERS}
    with_text = [d for d, rows in parsed.items() if rows and layout.text_column in rows[0]]
    if with_text:
        return max(with_text, key=lambda d: len(parsed[d][0]))
    best, best_score = ",", (0.0, 0)
    for delimiter, rows in parsed.items():
        widths = [len(row) for row in rows]
        if not widths or widths[0] < 2:
            continue
        agreement = sum(width == widths[0] for width in widths) / len(widths)
        score = (agreement, len(delimiter))
        if agreement > 0.6 and score > best_score:
            best, best_score = delimiter, score
    return best


def _sample_rows(sample: str, delimiter: str) -> list[list[str]]:
    lines = sample.split("\n")
    if len(lines) > 1 and len(sample) >= _SAMPLE_BYTES // 4:
        lines.pop()  # it may be cut off
    if len(delimiter) > 1:
        return [line.split(delimiter) for line in lines[:_SAMPLE_ROWS] if line]
    rows: list[list[str]] = []
    try:
        for row in csv.reader((line + "\n" for line in lines), delimiter=delimiter):
            if row:
                rows.append(row)
            if len(rows) == _SAMPLE_ROWS:
                break
    except csv.Error:
        pass
    return rows


def _columns(first: list[str], layout: Layout) -> tuple[bool, list[str]]:
    """Return whether the first row is a header, and the names of the columns."""
    if layout.header is not None:
        header = layout.header
    else:
        header = layout.text_column in first or not _NUMBERED_COLUMN.match(layout.text_column)
    return header, first if header else [f"column{n + 1}" for n in range(len(first))]


def _index_column(columns: list[str]) -> str | None:
    first = columns[0] if columns else None
    return first if first in ("", "Unnamed: 0", "index") and len(columns) > 1 else None


def _rejected(message: str) -> DatasetRejected:
    fault: Any = file_fault(message)
    return DatasetRejected([fault], 1)
