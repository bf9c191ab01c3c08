"""CSV and its relatives: any delimiter, with or without a header; fastText lines."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from services.shared.datasets.formats.records import (
    MAX_COLUMNS,
    MAX_LINE_BYTES,
    Record,
    header_faults,
    missing_column_fault,
)
from services.shared.datasets.formats.text_lines import read_lines
from services.shared.datasets.upload import FatalFault, Fault, Quotes

FASTTEXT_PREFIX = "__label__"
FASTTEXT_LABELS = "labels"


def read_delimited(
    path: Path,
    *,
    encoding: str,
    delimiter: str,
    header: list[str] | None,
    required: list[str],
    quotes: Quotes = Quotes.DOUBLED,
) -> Iterator[Record | Fault]:
    """Yield the rows of a table; `header` names the columns of a file without a header line.

    A file without one of the `required` columns yields one fault.
    """
    names = header
    for line, row in delimited_rows(path, encoding=encoding, delimiter=delimiter, quotes=quotes):
        if isinstance(row, Fault):
            yield row
        elif names is None:
            names = row
            faults = _header_faults(names, required, line=line)
            yield from faults
            if faults:
                return
        elif len(row) != len(names):
            message = f"has {len(row)} fields, but the header has {len(names)}"
            yield Fault(line=line, field=None, message=message)
        else:
            yield Record(line, dict(zip(names, row, strict=True)))


def delimited_rows(
    path: Path, *, encoding: str, delimiter: str, quotes: Quotes = Quotes.DOUBLED
) -> Iterator[tuple[int, list[str] | Fault]]:
    """Yield (first line of the row, its fields or a fault); skip empty lines."""
    if len(delimiter) > 1:
        yield from _split_rows(path, encoding=encoding, delimiter=delimiter)
        return
    faults: list[Fault] = []
    csv.field_size_limit(MAX_LINE_BYTES)
    rows = csv.reader(
        _decoded(path, encoding, faults),
        strict=True,
        delimiter=delimiter,
        doublequote=quotes is Quotes.DOUBLED,
        escapechar="\\" if quotes is Quotes.BACKSLASH else None,
        quoting=csv.QUOTE_NONE if quotes is Quotes.NONE else csv.QUOTE_MINIMAL,
    )
    while True:
        line = rows.line_num + 1
        syntax_fault: Fault | None = None
        try:
            row = next(rows, None)
        except csv.Error as error:
            message = f"is not valid CSV: {error}{_quote_help(str(error))}"
            unclosed = rows.line_num > line  # the quote has consumed the lines that follow
            kind = FatalFault if unclosed else Fault
            row, syntax_fault = [], kind(line=line, field=None, message=message)
        for fault in faults:
            yield line, fault
        faults.clear()
        if syntax_fault is not None:
            yield line, syntax_fault
            if isinstance(syntax_fault, FatalFault):
                return
        if row is None:
            return
        if row:
            yield line, row


def read_fasttext(path: Path, *, encoding: str) -> Iterator[Record | Fault]:
    """Yield `text` and `labels` of lines such as `__label__good __label__price the text`."""
    for number, line in read_lines(path, encoding=encoding):
        if isinstance(line, Fault):
            yield line
            continue
        labels: list[str] = []
        rest = line.strip()
        if not rest:
            continue
        while rest.startswith(FASTTEXT_PREFIX) and len(labels) < MAX_COLUMNS:
            label, _, rest = rest.partition(" ")
            labels.append(label.removeprefix(FASTTEXT_PREFIX))
            rest = rest.lstrip()
        yield Record(number, {"text": rest, FASTTEXT_LABELS: labels})


def _split_rows(
    path: Path, *, encoding: str, delimiter: str
) -> Iterator[tuple[int, list[str] | Fault]]:
    """Split lines at a delimiter of several characters, which has no quoting rules."""
    for number, line in read_lines(path, encoding=encoding):
        if isinstance(line, Fault):
            yield number, line
        elif line.strip():
            yield number, line.rstrip("\r\n").split(delimiter)


def _decoded(path: Path, encoding: str, faults: list[Fault]) -> Iterator[str]:
    """Yield lines for the CSV parser, which counts them; one with a fault is yielded as an empty line."""
    for _, line in read_lines(path, encoding=encoding):
        if isinstance(line, Fault):
            faults.append(line)
            yield "\n"
        else:
            yield line


def _header_faults(header: list[str], required: list[str], *, line: int) -> list[Fault]:
    faults = header_faults(header, line=line)
    if not faults:
        faults = [
            missing_column_fault(name, header, line=line) for name in required if name not in header
        ]
    return faults


def _quote_help(error: str) -> str:
    if "expected after" in error or "unexpected end" in error:
        return (
            '; a quote within a quoted field is written twice (""). '
            'For files that write \\" instead, give quotes as backslash (--quotes backslash); where quotes are '
            "ordinary characters, as none (--quotes none); to leave such rows out, give on_bad_rows as skip "
            "(--skip-bad-rows)"
        )
    return ""
