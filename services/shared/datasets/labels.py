"""From what stands in a row to a text and its labels, or what is wrong with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.shared.datasets.card import HeadType
from services.shared.datasets.reader import Record
from services.shared.datasets.upload import Fault, HeadColumn, Layout

MAX_TEXT_CHARACTERS = 1_000_000
MAX_LABEL_CHARACTERS = 200
_TOO_LONG = 10**MAX_LABEL_CHARACTERS

Labels = tuple[str, ...]  # sorted; one for a single-label head


@dataclass(frozen=True)
class Row:
    """A sound row: its text and, per head in the layout's order, its labels or None."""

    line: int
    text: str
    labels: tuple[Labels | None, ...]


class WrongValue(ValueError):
    """A value that cannot be a text or a label; the message says why."""


def parse_row(record: Record, layout: Layout) -> Row | list[Fault]:
    """Return the row, or everything that is wrong with it."""
    faults: list[Fault] = []
    text = ""
    try:
        text = _text(record.fields.get(layout.text_column))
    except WrongValue as error:
        faults.append(Fault(line=record.line, field=layout.text_column, message=str(error)))
    try:
        label_map = _label_map(record.fields.get(layout.labels_column)) if layout.heads else {}
    except WrongValue as error:
        faults.append(Fault(line=record.line, field=layout.labels_column, message=str(error)))
        return faults
    labels: list[Labels | None] = []
    for head in layout.heads:
        value = record.fields.get(head.source)
        try:
            labels.append(_labels(head, label_map.get(head.name) if value is None else value))
        except WrongValue as error:
            faults.append(Fault(line=record.line, field=head.name, message=str(error)))
    return faults or Row(record.line, text, tuple(labels))


def _text(value: Any) -> str:
    if value is None:
        raise WrongValue("there is no text")
    if not isinstance(value, str):
        raise WrongValue(f"the text is {_kind(value)}, not a string")
    if not value.strip():
        raise WrongValue("the text is empty")
    if len(value) > MAX_TEXT_CHARACTERS:
        raise WrongValue(f"the text is longer than {MAX_TEXT_CHARACTERS:,} characters")
    _check_characters(value, "the text")
    return value


def _label_map(value: Any) -> dict[str, Any]:
    """Return the map in the labels column: an object, Parquet's list of pairs, or JSON in CSV."""
    if value is None or value == "":
        return {}
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise WrongValue(f"the map of labels is not JSON: {error}") from error
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and all(isinstance(pair, tuple) for pair in value):
        return dict(value)
    # Some other column that happens to bear the name; a head may still be declared to read it.
    return {}


def _labels(head: HeadColumn, value: Any) -> Labels | None:
    """Return the labels in a value, None where there are none given."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if head.type is HeadType.SINGLE_LABEL:
        return (_label(value),)
    if isinstance(value, list):
        return tuple(sorted({_label(item) for item in value}))
    if isinstance(value, str):
        return tuple(sorted({_label(part) for part in value.split("|") if part.strip()}))
    raise WrongValue(f"the labels are {_kind(value)}, not a list, nor a string divided by |")


def _label(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) >= _TOO_LONG:
            raise WrongValue(f"the label is longer than {MAX_LABEL_CHARACTERS} characters")
        value = str(value)
    if not isinstance(value, str):
        raise WrongValue(f"the label is {_kind(value)}, not a string or a whole number")
    label = value.strip()
    if not label:
        raise WrongValue("a label is empty")
    if len(label) > MAX_LABEL_CHARACTERS:
        raise WrongValue(f"the label is longer than {MAX_LABEL_CHARACTERS} characters")
    _check_characters(label, "the label")
    return label


def _check_characters(text: str, what: str) -> None:
    if "\x00" in text:
        raise WrongValue(f"{what} holds a NUL character")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise WrongValue(f"{what} holds half of a surrogate pair") from None


_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number with a fraction",
    dict: "an object",
    list: "a list",
    type(None): "null",
    bytes: "binary",
}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), f"a {type(value).__name__}")
