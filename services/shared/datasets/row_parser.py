"""Parses a record into a text and its labels, or into the faults of the row."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.shared.datasets.card import HeadType
from services.shared.datasets.reader import Record
from services.shared.datasets.upload import Fault, HeadColumn, Layout

MAX_TEXT_CHARACTERS = 1_000_000
MAX_LABEL_CHARACTERS = 200
_MAX_INTEGER_LABEL = 10**MAX_LABEL_CHARACTERS

Labels = tuple[str, ...]  # sorted; exactly one for a single-label head


@dataclass(frozen=True)
class Row:
    """A valid row: its text and, per head in the layout's order, its labels or None."""

    line: int
    text: str
    labels: tuple[Labels | None, ...]


class InvalidValue(ValueError):
    """A value that is neither a valid text nor a valid label; the message says why."""


def parse_row(record: Record, layout: Layout) -> Row | list[Fault]:
    """Return the row, or all of its faults."""
    faults: list[Fault] = []
    text = ""
    try:
        text = _parse_text(record.fields.get(layout.text_column))
    except InvalidValue as error:
        faults.append(Fault(line=record.line, field=layout.text_column, message=str(error)))
    try:
        label_map = (
            _parse_label_map(record.fields.get(layout.labels_column)) if layout.heads else {}
        )
    except InvalidValue as error:
        faults.append(Fault(line=record.line, field=layout.labels_column, message=str(error)))
        return faults
    labels: list[Labels | None] = []
    for head in layout.heads:
        value = record.fields.get(head.label_column)
        if value is None:
            value = label_map.get(head.name)
        try:
            labels.append(_parse_labels(head, value))
        except InvalidValue as error:
            faults.append(Fault(line=record.line, field=head.name, message=str(error)))
    return faults or Row(record.line, text, tuple(labels))


def _parse_text(value: Any) -> str:
    if value is None:
        raise InvalidValue("the text is missing")
    if not isinstance(value, str):
        raise InvalidValue(f"the text is {_describe_type(value)}, not a string")
    if not value.strip():
        raise InvalidValue("the text is empty")
    if len(value) > MAX_TEXT_CHARACTERS:
        raise InvalidValue(f"the text is longer than {MAX_TEXT_CHARACTERS:,} characters")
    _check_characters(value, "the text")
    return value


def _parse_label_map(value: Any) -> dict[str, Any]:
    """Return the map in the labels column: an object, Parquet's list of pairs, or JSON in CSV."""
    if value is None or value == "":
        return {}
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InvalidValue(f"the map of labels is not valid JSON: {error}") from error
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and all(isinstance(pair, tuple) for pair in value):
        return dict(value)
    # An unrelated column that has the same name; a head may still be declared to read it.
    return {}


def _parse_labels(head: HeadColumn, value: Any) -> Labels | None:
    """Return the labels in a value, or None where they are missing."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if head.type is HeadType.SINGLE_LABEL:
        return (_parse_label(value),)
    if isinstance(value, list):
        return tuple(sorted({_parse_label(item) for item in value}))
    if isinstance(value, str):
        return tuple(sorted({_parse_label(part) for part in value.split("|") if part.strip()}))
    raise InvalidValue(
        f"the labels are {_describe_type(value)}, not a list or a string separated by |"
    )


def _parse_label(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) >= _MAX_INTEGER_LABEL:
            raise InvalidValue(f"the label is longer than {MAX_LABEL_CHARACTERS} characters")
        value = str(value)
    if not isinstance(value, str):
        raise InvalidValue(f"the label is {_describe_type(value)}, not a string or an integer")
    label = value.strip()
    if not label:
        raise InvalidValue("a label is empty")
    if len(label) > MAX_LABEL_CHARACTERS:
        raise InvalidValue(f"the label is longer than {MAX_LABEL_CHARACTERS} characters")
    _check_characters(label, "the label")
    return label


def _check_characters(text: str, name: str) -> None:
    if "\x00" in text:
        raise InvalidValue(f"{name} contains a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValue(f"{name} contains a lone surrogate") from None


_TYPE_DESCRIPTIONS = {
    bool: "a boolean",
    int: "an integer",
    float: "a floating-point number",
    dict: "an object",
    list: "a list",
    type(None): "null",
    bytes: "binary data",
}


def _describe_type(value: Any) -> str:
    return _TYPE_DESCRIPTIONS.get(type(value), f"a {type(value).__name__}")
