"""Examines the first rows of an upload: which columns hold text, labels or a split, and what was not declared."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from services.shared.datasets.card import HeadType
from services.shared.datasets.formats.folders import parse_split
from services.shared.datasets.formats.records import Record
from services.shared.datasets.formats.source import DetectedLayout, Source
from services.shared.datasets.head_names import HEAD_NAME_PATTERN, is_reserved_head_name
from services.shared.datasets.upload import HeadColumn, Layout, Quotes

_SAMPLE_ROWS = 1000
_MAX_COLUMNS = 200  # of which values are examined
_MAX_CLASSES = 200
_MAX_LABEL_CHARACTERS = 80
_TEXT_NAMES = (
    "text",
    "review",
    "content",
    "sentence",
    "comment",
    "body",
    "message",
    "document",
    "title",
    "query",
    "question",
    "messages",
    "conversations",
    "文本",
    "内容",
    "评论",
)
_LABEL_NAMES = (
    "label",
    "labels",
    "category",
    "class",
    "sentiment",
    "intent",
    "target",
    "topic",
    "tags",
)
_PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("text_a", "text_b"),
    ("text1", "text2"),
    ("question1", "question2"),
    ("query", "passage"),
    ("question", "answer"),
)
_SPLIT_NAMES = ("split", "set", "subset", "fold", "partition")


@dataclass
class _Column:
    """The values of a column in the sample."""

    name: str
    num_values: int = 0
    num_texts: int = 0
    num_lists: int = 0
    num_chats: int = 0
    num_splits: int = 0
    num_floats: int = 0
    characters: int = 0
    values: dict[str, int] = field(default_factory=dict)
    too_many: bool = False

    def add(self, value: Any) -> None:
        """Count a value."""
        if value is None or value == "":
            return
        self.num_values += 1
        if isinstance(value, list):
            self.num_lists += 1
            self.num_chats += bool(value) and all(isinstance(item, dict) for item in value)
            return
        if isinstance(value, dict):
            return
        self.num_texts += isinstance(value, str)
        self.num_floats += isinstance(value, float) and not value.is_integer()
        self.num_splits += parse_split(value) is not None
        text = str(value).strip()
        self.characters += len(text)
        if len(text) > _MAX_LABEL_CHARACTERS or len(self.values) > _MAX_CLASSES:
            self.too_many = True
        else:
            self.values[text] = self.values.get(text, 0) + 1

    @property
    def mean_characters(self) -> float:
        """Return the mean length of the values."""
        return self.characters / max(1, self.num_values)

    @property
    def is_split(self) -> bool:
        """Return whether every value names a split, and there are several."""
        return 0 < self.num_values == self.num_splits and len(self.values) > 1

    @property
    def is_yes_no(self) -> bool:
        """Return whether the column holds 0 and 1."""
        return (
            bool(self.values) and not self.too_many and set(self.values) <= {"0", "1", "0.0", "1.0"}
        )

    @property
    def looks_like_labels(self) -> bool:
        """Return whether the values repeat as labels do."""
        if self.num_chats or not self.num_values or self.num_floats:
            return False
        if self.num_lists == self.num_values:
            return True
        distinct = len(self.values)
        return not self.too_many and distinct > 1 and distinct * 2 <= self.num_values


@dataclass
class Profile:
    """What the first rows suggest, and what the declared layout leaves unread."""

    detected: DetectedLayout
    layout: Layout
    suggested: Layout  # the declared options, completed by what the columns suggest
    warnings: list[str]

    def command(self, filename: str) -> str:
        """Return the command that uploads the file as suggested."""
        return " ".join(["stillhouse datasets add", shlex.quote(filename), *self.options()])

    def options(self) -> list[str]:
        """Return the suggested options as they are written on the command line."""
        layout, options = self.suggested, []
        if layout.text_column != "text":
            options += ["--text-column", layout.text_column]
        if layout.text_pair_column is not None:
            options += ["--text-pair-column", layout.text_pair_column]
        for head in layout.heads:
            kind = ":multi_label" if head.type is HeadType.MULTI_LABEL else ""
            source = ",".join(head.columns) if head.columns else head.label_column
            options += ["--head", head.name + kind + (f"={source}" if source != head.name else "")]
        valued = {
            "--split-column": layout.split_column,
            "--encoding": layout.encoding,
            "--delimiter": layout.delimiter,
            "--label-separator": layout.label_separator,
            "--quotes": None if layout.quotes is Quotes.DOUBLED else layout.quotes.value,
        }
        for option, value in valued.items():
            options += [option, value] if value is not None else []
        for value in layout.missing_labels:
            options += ["--missing-label", value]
        if layout.header is not None:
            options.append("--header" if layout.header else "--no-header")
        flags = {
            "--merge-labels": layout.merge_labels,
            "--skip-bad-rows": layout.on_bad_rows == "skip",
            "--truncate-long-texts": layout.on_long_texts == "truncate",
            "--remove-control-characters": layout.on_control_characters == "remove",
        }
        options += [option for option, is_set in flags.items() if is_set]
        return [shlex.quote(option) for option in options]


def profile_source(source: Source, layout: Layout) -> Profile:
    """Examine the first rows of an upload."""
    names = source.detected.columns
    columns = {name: _Column(name) for name in names[:_MAX_COLUMNS]}
    for item in islice(source.records(None), _SAMPLE_ROWS):
        if isinstance(item, Record):
            for name, value in item.fields.items():
                if name in columns:
                    columns[name].add(value)
    suggested = _suggest(source.detected, columns, layout)
    return Profile(
        detected=source.detected,
        layout=layout,
        suggested=suggested,
        warnings=_warnings(source.detected, columns, layout, suggested),
    )


def _suggest(detected: DetectedLayout, columns: dict[str, _Column], layout: Layout) -> Layout:
    update: dict[str, Any] = {}
    text = layout.text_column
    pair = layout.text_pair_column
    if columns and text not in columns:
        found = _pair_columns(columns) if pair is None else None
        text, pair = found or (_text_column(columns) or text, pair)
        update |= {"text_column": text, "text_pair_column": pair}
    if detected.header and _looks_headless(detected.columns):
        numbered = {f"column{n + 1}": c for n, c in enumerate(columns.values())}
        text = _text_column(numbered) or "column1"
        heads = _renamed(_heads(numbered, text), layout.heads)
        return layout.model_copy(update={"header": False, "text_column": text, "heads": heads})
    split = layout.split_column or next((c.name for c in columns.values() if c.is_split), None)
    update["split_column"] = split
    others = (split, detected.index_column, pair)
    unread = {name: column for name, column in columns.items() if name not in others}
    declared = [
        head
        for head in layout.heads
        if head.columns or head.label_column in columns or layout.labels_column in columns
    ]
    update["heads"] = declared or _renamed(_heads(unread, text), layout.heads)
    return layout.model_copy(update=update)


def _renamed(found: list[HeadColumn], declared: list[HeadColumn]) -> list[HeadColumn]:
    """Return the heads that were found under the names that were declared, where the numbers agree."""
    if len(found) != len(declared):
        return found
    return [
        head if head.columns else HeadColumn(name=own.name, type=own.type, column=head.label_column)
        for head, own in zip(found, declared, strict=True)
    ]


def _text_column(columns: dict[str, _Column]) -> str | None:
    candidates = [c for c in columns.values() if (c.num_texts or c.num_chats) and not c.is_split]
    lowered = {c.name.lower(): name for name, c in columns.items() if c in candidates}
    for known in _TEXT_NAMES:
        if known in lowered:
            return lowered[known]
    longest = max(
        ((c.mean_characters, name) for name, c in columns.items() if c in candidates), default=None
    )
    return None if longest is None else longest[1]


def _pair_columns(columns: dict[str, _Column]) -> tuple[str, str] | None:
    """Return two columns that look like a pair of texts by their names, or None."""
    lowered = {name.lower(): name for name, column in columns.items() if column.num_texts}
    for first, second in _PAIRS:
        if first in lowered and second in lowered:
            return lowered[first], lowered[second]
    return None


def _looks_headless(names: list[str]) -> bool:
    """Return whether names of columns look like values: a text, a number or a repeated value."""
    if not names:
        return False
    known = {name.lower() for name in names} & {*_TEXT_NAMES, *_LABEL_NAMES, *_SPLIT_NAMES, "id"}
    longest = max(len(name) for name in names)
    return not known and (
        longest > 40
        or any(re.fullmatch(r"-?\d+(\.\d+)?", name) for name in names)
        or any(" " in name.strip() and len(name) > 12 for name in names)
        or any(re.search(r"[,，。！？!?]", name) for name in names)
    )


def _heads(columns: dict[str, _Column], text_column: str) -> list[HeadColumn]:
    found = {
        name: column
        for name, column in columns.items()
        if name != text_column and column.looks_like_labels
    }
    flags = [name for name, column in found.items() if column.is_yes_no]
    heads = []
    if len(flags) > 2:
        heads.append(HeadColumn(name="labels", type=HeadType.MULTI_LABEL, columns=flags))
        found = {name: column for name, column in found.items() if name not in flags}
    for ids in _described_ids(found):
        found.pop(ids)
    named = [name for name in found if name.lower() in _LABEL_NAMES]
    for name in (named or list(found))[: 8 if named else 3]:
        column = found[name]
        kind = (
            HeadType.MULTI_LABEL if column.num_lists or _is_list(column) else HeadType.SINGLE_LABEL
        )
        heads.append(_head(name, kind, taken={head.name for head in heads}))
    return heads


def _is_list(column: _Column) -> bool:
    values = list(column.values)
    return all(value.startswith("[") and value.endswith("]") for value in values) or (
        any("|" in value for value in values)
        and {part for value in values for part in value.split("|")} & set(values) != set()
    )


def _described_ids(columns: dict[str, _Column]) -> list[str]:
    """Return the columns of numbers that another column of names describes: as many, as often."""
    ids = []
    for name, column in columns.items():
        numeric = all(re.fullmatch(r"-?\d+(\.0+)?", value) for value in column.values)
        counts = sorted(column.values.values())
        described = any(
            counts == sorted(other.values.values())
            and not all(re.fullmatch(r"-?\d+(\.0+)?", value) for value in other.values)
            for other in columns.values()
            if other is not column
        )
        if numeric and column.values and described:
            ids.append(name)
    return ids


def _head(name: str, kind: HeadType, *, taken: set[str]) -> HeadColumn:
    if re.match(HEAD_NAME_PATTERN, name) and not is_reserved_head_name(name) and name not in taken:
        return HeadColumn(name=name, type=kind)
    own = next(n for n in ("label", *(f"label{k}" for k in range(2, 99))) if n not in taken)
    return HeadColumn(name=own, type=kind, column=name)


def _warnings(
    detected: DetectedLayout, columns: dict[str, _Column], layout: Layout, suggested: Layout
) -> list[str]:
    warnings = []
    read = set(layout.columns())
    if layout.split_column is None and suggested.split_column is not None:
        warnings.append(
            f"the column {suggested.split_column!r} states a split and was not read; give split_column "
            f"(--split-column {suggested.split_column}) to keep it"
        )
    if not layout.heads and suggested.heads:
        offered = " ".join(
            f"--head {head.name}"
            + ("" if head.label_column == head.name else f"={head.label_column}")
            for head in suggested.heads
            if not head.columns
        )
        warnings.append(
            "no head was declared: the texts are stored without labels, though columns look like labels"
            + (f"; to train on them: {offered}" if offered else "")
        )
    ids = set(_described_ids({n: c for n, c in columns.items() if c.looks_like_labels}))
    for head in layout.heads:
        column = columns.get(head.label_column)
        if column is None:
            continue
        if head.label_column in ids:
            warnings.append(
                f"{head.name}: {head.label_column!r} holds ids that another column describes; the names would be "
                "more readable labels"
            )
    pair = None if layout.text_pair_column else _pair_columns(columns)
    if pair is not None and set(pair) & read:
        first, second = pair
        only = first if first in read else second
        warnings.append(
            f"{first!r} and {second!r} look like a pair of texts, of which only {only!r} is read; to read both, "
            f"give text_pair_column (--text-column {first} --text-pair-column {second})"
        )
    for head in layout.heads:
        if detected.class_names.get(head.label_column):
            names = ", ".join(map(repr, detected.class_names[head.label_column][:5]))
            warnings.append(
                f"{head.name}: the ids were read as the names that the file states: {names}"
            )
    return warnings
