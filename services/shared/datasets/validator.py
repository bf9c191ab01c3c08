"""The first pass over an upload: validates every row, keeping only label indices and hashes in memory."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.shared.datasets.card import Head, Split
from services.shared.datasets.formats.records import Record
from services.shared.datasets.label_audit import label_faults, label_warnings
from services.shared.datasets.row_parser import Labels, Row, RowParser
from services.shared.datasets.split import assign_split, text_key
from services.shared.datasets.text import TextKind
from services.shared.datasets.upload import (
    DatasetRejected,
    FatalFault,
    Fault,
    HeadColumn,
    Layout,
)

MAX_REPORTED_FAULTS = 20
# A larger softmax is out of scope for this platform, and so many labels usually mean a column of ids.
MAX_CLASSES = 10_000
_MAX_EXAMPLES = 5


@dataclass
class DatasetSummary:
    """What is known about a valid upload before it is written."""

    heads: list[Head]
    rows: dict[Split, int]
    label_counts: dict[str, dict[str, int]]
    missing_labels: dict[str, int]
    warnings: list[str]
    text_kind: TextKind
    duplicate_lines: set[int]  # lines that repeat the text and the labels of an earlier line
    moved_lines: dict[int, Split]  # lines whose text occurs earlier in another of the stated splits
    num_skipped: int = 0


def validate(
    records: Iterable[Record | Fault], layout: Layout, parser: RowParser
) -> DatasetSummary:
    """Check every row and return a summary of the dataset; raises DatasetRejected."""
    validator = examine(records, layout, parser)
    summary = validator.summarize(parser.text_kind or TextKind.SINGLE)
    summary.warnings += parser_warnings(parser, layout)
    return summary


def examine(
    records: Iterable[Record | Fault], layout: Layout, parser: RowParser
) -> DatasetValidator:
    """Return a validator that has seen every row."""
    validator = DatasetValidator(layout)
    for record in records:
        if isinstance(record, Fault):
            validator.add_unreadable(record)
            continue
        row = parser.parse(record)
        if isinstance(row, Row):
            validator.add_row(row)
        else:
            validator.add_bad_row(row)
    return validator


def parser_warnings(parser: RowParser, layout: Layout) -> list[str]:
    """Return warnings about values that were interpreted."""
    warnings = []
    if parser.num_truncated:
        lines = _list_lines(parser.truncated_lines, total=parser.num_truncated)
        warnings.append(f"{parser.num_truncated} texts were truncated: {lines}")
    if parser.num_cleaned:
        lines = _list_lines(parser.cleaned_lines, total=parser.num_cleaned)
        warnings.append(f"control characters were removed from {parser.num_cleaned} texts: {lines}")
    if parser.text_kind is TextKind.CHAT:
        warnings.append(
            "the texts are chat messages: they are rendered by the chat template of the model's tokenizer, or "
            'as lines of `role: content` where it has none; send /predict {"messages": [...]}'
        )
    for index, head in enumerate(layout.heads):
        if count := parser.num_not_a_number[index]:
            warnings.append(f"{head.name}: {count} values are NaN and were read as no label")
        if count := parser.num_integral_floats[index]:
            warnings.append(
                f"{head.name}: {count} numbers such as 1.0 were read as the label '1'; give them names in "
                f"label_names (--label-names {head.name}=FILE)"
            )
        if count := parser.num_booleans[index]:
            warnings.append(
                f"{head.name}: {count} booleans were read as the labels 'true' and 'false'"
            )
    return warnings


@dataclass
class _ClassCount:
    first_line: int
    total: int = 0
    in_train: int = 0


@dataclass
class DatasetValidator:
    """Counts rows, labels and faults row by row, then checks the dataset as a whole."""

    layout: Layout
    faults: list[Fault] = field(default_factory=list)
    num_faults: int = 0
    rows: Counter[Split] = field(default_factory=Counter)
    # Every distinct combination of labels has an index; a row keeps only that index.
    combinations: list[tuple[Labels | None, ...]] = field(default_factory=list)
    combination_indices: dict[tuple[Labels | None, ...], int] = field(default_factory=dict)
    row_combination: array[int] = field(default_factory=lambda: array("l"))
    row_line: array[int] = field(default_factory=lambda: array("q"))
    first_row: dict[bytes, int] = field(default_factory=dict)  # text key -> row
    repeated: dict[bytes, set[int]] = field(default_factory=dict)  # text key -> combinations
    duplicate_lines: set[int] = field(default_factory=set)
    contradictions: list[tuple[int, int, str]] = field(default_factory=list)
    num_contradictions: int = 0
    row_split: list[Split] = field(default_factory=list)
    moved_lines: dict[int, Split] = field(default_factory=dict)
    has_stated_splits: bool = False
    skipped: list[Fault] = field(
        default_factory=list
    )  # the first faults of rows that were left out
    num_skipped: int = 0

    def __post_init__(self) -> None:
        self.classes: list[dict[str, _ClassCount]] = [{} for _ in self.layout.heads]
        self.missing = [0] * len(self.layout.heads)

    def add_faults(self, *faults: Fault) -> None:
        """Count faults; keep the first MAX_REPORTED_FAULTS."""
        self.num_faults += len(faults)
        self.faults += faults[: MAX_REPORTED_FAULTS - len(self.faults)]

    def add_unreadable(self, fault: Fault) -> None:
        """Count the fault of a row that could not be read."""
        if fault.line is None or isinstance(fault, FatalFault):
            self.add_faults(fault)
        else:
            self.add_bad_row([fault])

    def add_bad_row(self, faults: list[Fault]) -> None:
        """Count the faults of a row, or leave the row out where the layout says so."""
        if self.layout.on_bad_rows == "reject":
            self.add_faults(*faults)
            return
        self.num_skipped += 1
        if len(self.skipped) < _MAX_EXAMPLES:
            self.skipped.append(faults[0])

    def add_row(self, row: Row) -> None:
        """Count a valid row, unless it duplicates an earlier one."""
        key = text_key(row.text)
        combination = self.combination_indices.setdefault(row.labels, len(self.combinations))
        if combination == len(self.combinations):
            self.combinations.append(row.labels)
        if self._is_duplicate(row, key, combination):
            self.duplicate_lines.add(row.line)
            return
        split = assign_split(key, self.layout.fractions)
        if row.split is not None:
            self.has_stated_splits = True
            split = row.split
            first = self.first_row[key]
            if first < len(self.row_split) and self.row_split[first] is not split:
                split = self.moved_lines[row.line] = self.row_split[first]
            self.row_split.append(split)
        self.rows[split] += 1
        self.row_combination.append(combination)
        self.row_line.append(row.line)
        for head_index, labels in enumerate(row.labels):
            self._count_labels(head_index, labels, line=row.line, split=split)

    def summarize(self, text_kind: TextKind) -> DatasetSummary:
        """Check the dataset as a whole; raises DatasetRejected if there are any faults."""
        self._check_splits()
        for head, classes in zip(self.layout.heads, self.classes, strict=True):
            self._check_head(head, classes)
            counts = {label: count.total for label, count in classes.items()}
            self.add_faults(*label_faults(head, counts, self.layout))
        if self.num_faults:
            raise DatasetRejected(self.faults, self.num_faults)
        heads = [
            Head(name=head.name, type=head.type, labels=sorted(classes))
            for head, classes in zip(self.layout.heads, self.classes, strict=True)
        ]
        return DatasetSummary(
            heads=heads,
            rows={split: self.rows[split] for split in Split},
            label_counts={
                head.name: {label: classes[label].total for label in head.labels}
                for head, classes in zip(heads, self.classes, strict=True)
            },
            missing_labels={
                head.name: missing for head, missing in zip(heads, self.missing, strict=True)
            },
            warnings=self._warnings(),
            text_kind=text_kind,
            duplicate_lines=self.duplicate_lines,
            moved_lines=self.moved_lines,
            num_skipped=self.num_skipped,
        )

    def _is_duplicate(self, row: Row, key: bytes, combination: int) -> bool:
        """Return whether the text was seen with the same labels; record contradicting labels."""
        first = self.first_row.setdefault(key, len(self.row_line))
        if first == len(self.row_line):
            return False
        seen = self.repeated.setdefault(key, {self.row_combination[first]})
        if combination in seen:
            return True
        seen.add(combination)
        earlier = self.combinations[self.row_combination[first]]
        for head, old, new in zip(self.layout.heads, earlier, row.labels, strict=True):
            if old is not None and new is not None and old != new:
                self.num_contradictions += 1
                if len(self.contradictions) < _MAX_EXAMPLES:
                    self.contradictions.append((self.row_line[first], row.line, head.name))
        return False

    def _count_labels(
        self, head_index: int, labels: Labels | None, *, line: int, split: Split
    ) -> None:
        if labels is None:
            self.missing[head_index] += 1
            return
        classes = self.classes[head_index]
        for label in labels:
            if label not in classes and len(classes) == MAX_CLASSES:
                message = f"has more than {MAX_CLASSES:,} different labels"
                head = self.layout.heads[head_index]
                self.add_faults(Fault(line=line, field=head.name, message=message))
                return
            count = classes.setdefault(label, _ClassCount(first_line=line))
            count.total += 1
            count.in_train += split is Split.TRAIN

    def _check_splits(self) -> None:
        total = sum(self.rows.values())
        if total == 0:
            if not self.num_faults:
                self.add_faults(Fault(line=None, field=None, message="there are no rows"))
            return
        required = [Split.TRAIN, Split.VALIDATION] if self.layout.heads else [Split.TRAIN]
        for split in required:
            if self.rows[split] == 0:
                fraction = getattr(self.layout.fractions, split.value)
                if self.has_stated_splits:
                    message = (
                        f"the {split} split is empty: the upload states its splits, and none of its rows is in "
                        "this one; add rows, or leave out split_column (--split-column) and send one file"
                    )
                    self.add_faults(Fault(line=None, field=None, message=message))
                    continue
                message = (
                    f"the {split} split is empty: {total} different texts are too few for a fraction "
                    f"of {fraction:g}; add texts or change the fractions"
                )
                self.add_faults(Fault(line=None, field=None, message=message))

    def _check_head(self, head: HeadColumn, classes: dict[str, _ClassCount]) -> None:
        if not self.row_line:
            return
        if not classes:
            message = (
                f"has no labels: no row has a value in column {head.label_column!r}, "
                f"nor for {head.name!r} in a map in column {self.layout.labels_column!r}"
            )
            self.add_faults(Fault(line=None, field=head.name, message=message))
        elif len(classes) == 1:
            label = next(iter(classes))
            message = f"has only the label {label!r}; at least two are required"
            self.add_faults(Fault(line=None, field=head.name, message=message))
        for label, count in classes.items():
            if count.total == 1:
                message = f"label {label!r} has only this example; at least two are required"
                self.add_faults(Fault(line=count.first_line, field=head.name, message=message))

    def _warnings(self) -> list[str]:
        warnings = []
        if self.num_skipped:
            shown = "; ".join(map(str, self.skipped))
            more = "; ..." if self.num_skipped > len(self.skipped) else ""
            warnings.append(f"{self.num_skipped} rows with faults were left out: {shown}{more}")
        if self.moved_lines:
            lines = _list_lines(sorted(self.moved_lines))
            warnings.append(
                f"{len(self.moved_lines)} rows repeat a text of another split and were moved to it: {lines}"
            )
        if self.duplicate_lines:
            lines = _list_lines(sorted(self.duplicate_lines))
            warnings.append(
                f"{len(self.duplicate_lines)} rows duplicate an earlier row and were dropped: {lines}"
            )
        if self.num_contradictions:
            pairs = ", ".join(
                f"lines {first} and {second} ({head})"
                for first, second, head in self.contradictions
            )
            more = ", ..." if self.num_contradictions > len(self.contradictions) else ""
            warnings.append(
                f"{self.num_contradictions} labels contradict those of an earlier row with the same "
                f"text: {pairs}{more}"
            )
        for head, classes in zip(self.layout.heads, self.classes, strict=True):
            absent = sorted(label for label, count in classes.items() if not count.in_train)
            if absent:
                listed = ", ".join(repr(label) for label in absent[:_MAX_EXAMPLES])
                warnings.append(f"{head.name}: no training text has the label {listed}")
            warnings += label_warnings(
                head, {label: count.total for label, count in classes.items()}
            )
        expects_test = self.layout.fractions.test > 0
        if self.rows[Split.TEST] == 0 and (expects_test or self.has_stated_splits):
            warnings.append("the test split is empty")
        return warnings


def _list_lines(lines: list[int], *, total: int | None = None) -> str:
    shown = ", ".join(str(line) for line in lines[:_MAX_EXAMPLES])
    num_lines = len(lines) if total is None else total
    return f"lines {shown}" + (", ..." if num_lines > _MAX_EXAMPLES else "")
