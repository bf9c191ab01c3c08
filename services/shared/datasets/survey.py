"""The first reading of an upload: every row is looked at, nothing but codes and hashes is kept."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.shared.datasets.card import Head, Split
from services.shared.datasets.labels import Labels, Row, parse_row
from services.shared.datasets.reader import Record
from services.shared.datasets.split import split_of, text_key
from services.shared.datasets.upload import DatasetRejected, Fault, HeadColumn, Layout

MAX_FAULTS_NAMED = 20
# A softmax over more is not what this platform is for; so many usually mean a column of ids.
MAX_CLASSES = 10_000
_MAX_EXAMPLES = 5


@dataclass
class Survey:
    """What is known of a sound upload before it is written."""

    heads: list[Head]
    rows: dict[Split, int]
    label_counts: dict[str, dict[str, int]]
    missing_labels: dict[str, int]
    warnings: list[str]
    dropped_lines: set[int]  # lines that repeat an earlier one, labels and all


def survey(records: Iterable[Record | Fault], layout: Layout) -> Survey:
    """Look at every row and return what the dataset will be; raises DatasetRejected."""
    surveyor = _Surveyor(layout)
    for record in records:
        if isinstance(record, Fault):
            surveyor.note(record)
            continue
        row = parse_row(record, layout)
        if isinstance(row, Row):
            surveyor.add(row)
        else:
            surveyor.note(*row)
    return surveyor.conclude()


@dataclass
class _Class:
    first_line: int
    count: int = 0
    in_train: int = 0


@dataclass
class _Surveyor:
    layout: Layout
    faults: list[Fault] = field(default_factory=list)
    num_faults: int = 0
    rows: Counter[Split] = field(default_factory=Counter)
    # Every distinct combination of labels has a number; a row keeps one number.
    combinations: list[tuple[Labels | None, ...]] = field(default_factory=list)
    numbers: dict[tuple[Labels | None, ...], int] = field(default_factory=dict)
    row_combination: array[int] = field(default_factory=lambda: array("l"))
    row_line: array[int] = field(default_factory=lambda: array("q"))
    first_row: dict[bytes, int] = field(default_factory=dict)  # text key -> row
    repeated: dict[bytes, set[int]] = field(default_factory=dict)  # text key -> combinations
    dropped_lines: set[int] = field(default_factory=set)
    contradictions: list[tuple[int, int, str]] = field(default_factory=list)
    num_contradictions: int = 0

    def __post_init__(self) -> None:
        self.classes: list[dict[str, _Class]] = [{} for _ in self.layout.heads]
        self.missing = [0] * len(self.layout.heads)

    def note(self, *faults: Fault) -> None:
        """Count faults; keep the first."""
        self.num_faults += len(faults)
        self.faults += faults[: MAX_FAULTS_NAMED - len(self.faults)]

    def add(self, row: Row) -> None:
        """Take a sound row in, unless it repeats an earlier one."""
        key = text_key(row.text)
        combination = self.numbers.setdefault(row.labels, len(self.combinations))
        if combination == len(self.combinations):
            self.combinations.append(row.labels)
        if self._repeats(row, key, combination):
            self.dropped_lines.add(row.line)
            return
        split = split_of(key, self.layout.fractions)
        self.rows[split] += 1
        self.row_combination.append(combination)
        self.row_line.append(row.line)
        for number, labels in enumerate(row.labels):
            self._count(number, labels, line=row.line, split=split)

    def conclude(self) -> Survey:
        """Judge the whole; raises DatasetRejected where anything is wrong."""
        self._judge_splits()
        for number, head in enumerate(self.layout.heads):
            self._judge_head(head, self.classes[number])
        if self.num_faults:
            raise DatasetRejected(self.faults, self.num_faults)
        heads = [
            Head(name=head.name, type=head.type, labels=sorted(self.classes[number]))
            for number, head in enumerate(self.layout.heads)
        ]
        return Survey(
            heads=heads,
            rows={split: self.rows[split] for split in Split},
            label_counts={
                head.name: {label: self.classes[number][label].count for label in head.labels}
                for number, head in enumerate(heads)
            },
            missing_labels={head.name: self.missing[n] for n, head in enumerate(heads)},
            warnings=self._warnings(),
            dropped_lines=self.dropped_lines,
        )

    def _repeats(self, row: Row, key: bytes, combination: int) -> bool:
        """Return whether text and labels have been seen; note labels that contradict."""
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

    def _count(self, number: int, labels: Labels | None, *, line: int, split: Split) -> None:
        if labels is None:
            self.missing[number] += 1
            return
        classes = self.classes[number]
        for label in labels:
            if label not in classes and len(classes) == MAX_CLASSES:
                message = f"has more than {MAX_CLASSES:,} different labels"
                self.note(Fault(line=line, field=self.layout.heads[number].name, message=message))
                return
            found = classes.setdefault(label, _Class(first_line=line))
            found.count += 1
            found.in_train += split is Split.TRAIN

    def _judge_splits(self) -> None:
        total = sum(self.rows.values())
        if total == 0:
            if not self.num_faults:
                self.note(Fault(line=None, field=None, message="there are no rows"))
            return
        needed = [Split.TRAIN, Split.VALIDATION] if self.layout.heads else [Split.TRAIN]
        for split in needed:
            if self.rows[split] == 0:
                share = getattr(self.layout.fractions, split.value)
                message = (
                    f"no text falls into the {split} split: {total} different texts are too few "
                    f"for a share of {share:g}; add texts or change the shares"
                )
                self.note(Fault(line=None, field=None, message=message))

    def _judge_head(self, head: HeadColumn, classes: dict[str, _Class]) -> None:
        if not self.row_line:
            return
        if not classes:
            message = (
                f"has no labels: no row has a value in column {head.source!r}, "
                f"nor for {head.name!r} in a map in column {self.layout.labels_column!r}"
            )
            self.note(Fault(line=None, field=head.name, message=message))
        elif len(classes) == 1:
            message = f"has the one label {next(iter(classes))!r}; two are the least"
            self.note(Fault(line=None, field=head.name, message=message))
        for label, found in classes.items():
            if found.count == 1:
                message = f"label {label!r} has this one example; two are the least"
                self.note(Fault(line=found.first_line, field=head.name, message=message))

    def _warnings(self) -> list[str]:
        warnings = []
        if self.dropped_lines:
            lines = _some(sorted(self.dropped_lines))
            warnings.append(
                f"{len(self.dropped_lines)} rows repeat an earlier row and were left out: {lines}"
            )
        if self.num_contradictions:
            pairs = ", ".join(
                f"lines {first} and {second} ({head})"
                for first, second, head in self.contradictions
            )
            more = ", ..." if self.num_contradictions > len(self.contradictions) else ""
            warnings.append(
                f"{self.num_contradictions} labels contradict those of the same text before: {pairs}{more}"
            )
        for number, head in enumerate(self.layout.heads):
            absent = sorted(label for label, c in self.classes[number].items() if not c.in_train)
            if absent:
                named = ", ".join(repr(label) for label in absent[:_MAX_EXAMPLES])
                warnings.append(f"{head.name}: no training text has the label {named}")
        if self.rows[Split.TEST] == 0 and self.layout.fractions.test > 0:
            warnings.append("no text falls into the test split")
        return warnings


def _some(lines: list[int]) -> str:
    shown = ", ".join(str(line) for line in lines[:_MAX_EXAMPLES])
    return f"lines {shown}" + (", ..." if len(lines) > _MAX_EXAMPLES else "")
