"""Parses a record into a text and its labels, or into the faults of the row."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.shared.datasets.card import HeadType, Split
from services.shared.datasets.formats.folders import parse_split
from services.shared.datasets.formats.records import Record
from services.shared.datasets.label_spelling import normalize_label
from services.shared.datasets.text import (
    Chat,
    Message,
    Pair,
    Text,
    TextKind,
    character_fault,
    remove_control_characters,
)
from services.shared.datasets.upload import Fault, HeadColumn, Layout

MAX_TEXT_CHARACTERS = 1_000_000
MAX_LABEL_CHARACTERS = 200
_MAX_INTEGER_LABEL = 10**MAX_LABEL_CHARACTERS
_MAX_LIST_CHARACTERS = 64 * 1024
_INTEGRAL_FLOAT = re.compile(r"^(-?\d{1,18})\.0+$")
_YES = frozenset({"1", "true", "yes", "y", "t", "x"})
_NO = frozenset({"0", "false", "no", "n", "f", ""})
_ROLE_KEYS = (("role", "content"), ("from", "value"))
_CONTROL_HELP = "; to remove such characters, give on_control_characters as remove (--remove-control-characters)"
_MAX_NOTED_LINES = 5

Labels = tuple[str, ...]  # sorted; exactly one for a single-label head


@dataclass(frozen=True)
class Row:
    """A valid row: its text and, per head in the layout's order, its labels or None."""

    line: int
    text: Text
    labels: tuple[Labels | None, ...]
    split: Split | None = None  # as the upload states it


class InvalidValue(ValueError):
    """A value that is no valid label; the message says why."""


class _InvalidText(ValueError):
    """A value of `column` that is no valid text; the message says why."""

    def __init__(self, column: str, message: str) -> None:
        super().__init__(message)
        self.column = column


class RowParser:
    """Parses the rows of one upload, in their order, and counts what it had to interpret."""

    def __init__(
        self, layout: Layout, class_names: Mapping[str, Sequence[str]] | None = None
    ) -> None:
        """`class_names` are those that the file states by column."""
        self._layout = layout
        self._names = [
            layout.label_names.get(head.name)
            or _numbered((class_names or {}).get(head.label_column, ()))
            for head in layout.heads
        ]
        self._missing = frozenset(layout.missing_labels)
        self._spellings: list[dict[str, str]] = [{} for _ in layout.heads]
        # None until the first valid text: a dataset has texts or chats, never both.
        self.text_kind = None if layout.text_pair_column is None else TextKind.PAIR
        self.truncated_lines: list[int] = []
        self.num_truncated = 0
        self.cleaned_lines: list[int] = []
        self.num_cleaned = 0
        self.num_not_a_number = [0] * len(layout.heads)
        self.num_integral_floats = [0] * len(layout.heads)
        self.num_booleans = [0] * len(layout.heads)

    def parse(self, record: Record) -> Row | list[Fault]:
        """Return the row, or all of its faults."""
        layout = self._layout
        faults: list[Fault] = []
        text: Text = ""
        try:
            text = self._parse_text(record)
        except _InvalidText as error:
            faults.append(Fault(line=record.line, field=error.column, message=str(error)))
        split = record.split
        if layout.split_column is not None:
            split = parse_split(value := record.fields.get(layout.split_column))
            if split is None:
                message = (
                    f"the split is {str(value)[:80]!r}, not train, validation (val, dev) or test"
                )
                faults.append(Fault(line=record.line, field=layout.split_column, message=message))
        try:
            label_map = (
                _parse_label_map(record.fields.get(layout.labels_column)) if layout.heads else {}
            )
        except InvalidValue as error:
            faults.append(Fault(line=record.line, field=layout.labels_column, message=str(error)))
            return faults
        labels: list[Labels | None] = []
        for index, head in enumerate(layout.heads):
            try:
                labels.append(self._parse_head(index, head, record.fields, label_map))
            except InvalidValue as error:
                faults.append(Fault(line=record.line, field=head.name, message=str(error)))
        return faults or Row(record.line, text, tuple(labels), split)

    def _parse_text(self, record: Record) -> Text:
        layout, line = self._layout, record.line
        value = record.fields.get(layout.text_column)
        if layout.text_pair_column is not None:
            other = record.fields.get(layout.text_pair_column)
            return Pair(
                self._parse_string(value, column=layout.text_column, line=line),
                self._parse_string(other, column=layout.text_pair_column, line=line),
            )
        messages = _parse_messages(value)
        text: Text
        if messages is None:
            kind, text = (
                TextKind.SINGLE,
                self._parse_string(value, column=layout.text_column, line=line),
            )
        else:
            kind, text = TextKind.CHAT, self._parse_chat(messages, line=line)
        if self.text_kind is None:
            self.text_kind = kind
        if kind is not self.text_kind:
            described = {TextKind.CHAT: "chat messages", TextKind.SINGLE: "a string"}
            raise _InvalidText(
                layout.text_column,
                f"the text is {described[kind]}, but the texts before it are {described[self.text_kind]}",
            )
        return text

    def _parse_chat(self, messages: list[Message], *, line: int) -> Chat:
        """Return checked messages; an empty message is allowed, an empty chat is not."""
        column = self._layout.text_column
        if not any(message.content.strip() for message in messages):
            raise _InvalidText(column, "the text is empty: no message has any content")
        if sum(len(message.content) for message in messages) > MAX_TEXT_CHARACTERS:
            raise _InvalidText(
                column, f"the messages are longer than {MAX_TEXT_CHARACTERS:,} characters"
            )
        return Chat(
            tuple(
                Message(*(self._check_characters(part, column=column, line=line) for part in each))
                for each in messages
            )
        )

    def _parse_string(self, value: Any, *, column: str, line: int) -> str:
        """Return a text, truncated and cleaned where the layout says so."""
        if value is None:
            raise _InvalidText(column, "the text is missing")
        if not isinstance(value, str):
            raise _InvalidText(column, f"the text is {_describe_type(value)}, not a string")
        if len(value) > MAX_TEXT_CHARACTERS:
            if self._layout.on_long_texts != "truncate":
                raise _InvalidText(
                    column,
                    f"the text is longer than {MAX_TEXT_CHARACTERS:,} characters; give on_long_texts as "
                    "truncate (--truncate-long-texts)",
                )
            value = value[:MAX_TEXT_CHARACTERS]
            self.num_truncated += 1
            _note(self.truncated_lines, line)
        text = self._check_characters(value, column=column, line=line)
        if not text.strip():
            raise _InvalidText(column, "the text is empty")
        return text

    def _check_characters(self, text: str, *, column: str, line: int) -> str:
        fault = character_fault(text)
        if fault is None:
            return text
        if self._layout.on_control_characters == "remove":
            text = remove_control_characters(text)
            if character_fault(text) is None:
                self.num_cleaned += 1
                _note(self.cleaned_lines, line)
                return text
        help = "" if "surrogate" in fault else _CONTROL_HELP
        raise _InvalidText(column, f"the text {fault}{help}")

    def _parse_head(
        self, index: int, head: HeadColumn, fields: dict[str, Any], label_map: dict[str, Any]
    ) -> Labels | None:
        """Return the labels of a head, or None where they are missing."""
        if head.columns:
            return _gather(head, fields)
        value = fields.get(head.label_column)
        if value is None:
            value = label_map.get(head.name)
        if value is None or (isinstance(value, str) and not value.strip()):
            return None
        if head.type is HeadType.SINGLE_LABEL:
            label = self._parse_label(index, value)
            return None if label is None else (label,)
        items = self._split_labels(index, value)
        labels = [self._parse_label(index, item) for item in items]
        if items and not any(labels):
            return None
        return tuple(sorted({label for label in labels if label is not None}))

    def _split_labels(self, index: int, value: Any) -> list[Any]:
        """Return the labels in the value of a multi-label head."""
        if isinstance(value, str):
            text = value.strip()
            if not (text.startswith("[") and text.endswith("]")):
                separator = self._layout.label_separator or "|"
                return [part for part in text.split(separator) if part.strip()]
            value = _parse_list(text)
        if isinstance(value, list):
            names = self._names[index]
            if names and len(value) == len(names) > 1 and all(item in (0, 1) for item in value):
                return [str(position) for position, item in enumerate(value) if item]
            return value
        raise InvalidValue(
            f"the labels are {_describe_type(value)}, not a list or a string separated by |"
        )

    def _parse_label(self, index: int, value: Any) -> str | None:
        """Return a label, or None for a value that means that there is none."""
        if isinstance(value, float):
            if math.isnan(value):
                self.num_not_a_number[index] += 1
                return None
            if value.is_integer() and abs(value) < 2**53:
                self.num_integral_floats[index] += 1
                value = int(value)
        if isinstance(value, bool):
            self.num_booleans[index] += 1
            value = "true" if value else "false"
        label = _label_text(value)
        if label in self._missing:
            return None
        if match := _INTEGRAL_FLOAT.match(label):
            self.num_integral_floats[index] += 1
            label = str(int(match[1]))
            if label in self._missing:
                return None
        if names := self._names[index]:
            if label not in names:
                raise InvalidValue(
                    f"the label {label[:80]!r} has no name; the names are for "
                    f"{', '.join(list(names)[:10])}. If it means that there is no label, give "
                    f"missing_labels (--missing-label {label[:80]})"
                )
            label = _label_text(names[label])
        if self._layout.merge_labels:
            label = self._spellings[index].setdefault(normalize_label(label), label)
        return label


def _numbered(names: Sequence[str]) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(names)}


def _note(lines: list[int], line: int) -> None:
    if len(lines) < _MAX_NOTED_LINES:
        lines.append(line)


def _parse_messages(value: Any) -> list[Message] | None:
    """Return chat messages, or None where the value is something else."""
    if not isinstance(value, list) or not value:
        return None
    messages = []
    for item in value:
        if not isinstance(item, dict):
            return None
        for role_key, content_key in _ROLE_KEYS:
            role, content = item.get(role_key), item.get(content_key)
            if isinstance(role, str) and isinstance(content, str):
                messages.append(Message(role, content))
                break
        else:
            return None
    return messages


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


def _gather(head: HeadColumn, fields: dict[str, Any]) -> Labels | None:
    """Return the columns whose value is yes, or None where all are missing."""
    labels, num_missing = [], 0
    for column in head.columns:
        value = fields.get(column)
        if value is None or (isinstance(value, float) and math.isnan(value)) or value == "":
            num_missing += 1
            continue
        text = str(int(value) if isinstance(value, bool | float) and value in (0, 1) else value)
        text = text.strip().lower().removesuffix(".0")
        if text in _YES:
            labels.append(column)
        elif text not in _NO:
            raise InvalidValue(f"column {column!r} holds {str(value)[:80]!r}, not 0 or 1")
    return None if num_missing == len(head.columns) else tuple(sorted(labels))


def _parse_list(text: str) -> list[Any]:
    """Parse a string that looks like a list, in JSON or as Python prints it."""
    if len(text) > _MAX_LIST_CHARACTERS:
        raise InvalidValue(f"the list is longer than {_MAX_LIST_CHARACTERS:,} characters")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise InvalidValue(f"the labels {text[:80]!r} are not a valid list") from None
    if not isinstance(value, list):
        raise InvalidValue(f"the labels {text[:80]!r} are not a list")
    return value


def _label_text(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) >= _MAX_INTEGER_LABEL:
            raise InvalidValue(f"the label is longer than {MAX_LABEL_CHARACTERS} characters")
        value = str(value)
    if not isinstance(value, str):
        raise InvalidValue(
            f"the label is {_describe_type(value)}, not a string or an integer"
            + ("; declare the head as multi_label" if isinstance(value, list) else "")
        )
    label = value.strip()
    if not label:
        raise InvalidValue("a label is empty")
    if len(label) > MAX_LABEL_CHARACTERS:
        raise InvalidValue(f"the label is longer than {MAX_LABEL_CHARACTERS} characters")
    if fault := character_fault(label):
        raise InvalidValue(f"the label {fault}")
    return label


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
