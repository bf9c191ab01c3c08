"""Examines the labels of a head as a whole for values that are probably not what they were read as."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

from services.shared.datasets.card import HeadType
from services.shared.datasets.label_spelling import normalize_label
from services.shared.datasets.upload import Fault, HeadColumn, Layout

_YES_NO = frozenset({"0", "1", "true", "false", "yes", "no"})
_SEPARATORS = (";", ",", "|", "/")
_MISSING = frozenset({"nan", "na", "n/a", "<na>", "null", "none"})
_INTEGER = re.compile(r"^-?\d+$")
_MAX_EXAMPLES = 3


def label_faults(head: HeadColumn, counts: Mapping[str, int], layout: Layout) -> list[Fault]:
    """Return faults of labels that cannot have been meant, each with the option that helps."""
    labels = list(counts)
    if head.columns or not labels:
        return []
    option = f"--head {head.name}:multi_label={head.label_column}"
    if head.type is HeadType.SINGLE_LABEL:
        lists = [label for label in labels if label.startswith("[") and label.endswith("]")]
        if lists:
            return [
                _fault(
                    head,
                    f"labels look like lists, for example {lists[0][:60]!r}; declare the head as multi_label "
                    f"({option})",
                )
            ]
        return []
    if set(map(str.lower, labels)) <= _YES_NO:
        return [
            _fault(
                head,
                f"a multi_label head has only the values {', '.join(map(repr, sorted(labels)))}: these are not "
                f"labels. For a column of yes and no, declare --head {head.name}={head.label_column}; for several "
                f"such columns, --head {head.name}:multi_label=COLUMN1,COLUMN2; for vectors of 0 and 1, name the "
                f"positions in label_names (--label-names {head.name}=FIRST,SECOND)",
            )
        ]
    separator = None if layout.label_separator else _joined_by(labels, minimum=1)
    if separator:
        example = next(label for label in labels if separator in label)
        return [
            _fault(
                head,
                f"labels such as {example[:60]!r} look like several joined by {separator!r}; give "
                f"label_separator (--label-separator {_quoted(separator)}), or | where they are single labels",
            )
        ]
    return []


def label_warnings(head: HeadColumn, counts: Mapping[str, int]) -> list[str]:
    """Return warnings about labels that may not be meant, each with the option that helps."""
    if head.columns:
        return []
    warnings = []
    for group in _twins(counts)[:_MAX_EXAMPLES]:
        shown = ", ".join(f"{label!r} ({counts[label]})" for label in group)
        warnings.append(
            f"{head.name}: the labels {shown} differ only in case, width, white space or invisible characters; "
            "merge_labels (--merge-labels) reads them as one"
        )
    for label in _missing_values(counts):
        warnings.append(
            f"{head.name}: {label!r} ({counts[label]} texts) was read as a class; if it means that there is no "
            f"label, give missing_labels (--missing-label {label})"
        )
    separator = None
    if head.type is HeadType.SINGLE_LABEL:
        separator = _joined_by(list(counts), minimum=2)
    if separator:
        example = next(label for label in counts if separator in label)
        warnings.append(
            f"{head.name}: labels such as {example[:60]!r} were read as one label each; if they are several, "
            f"declare --head {head.name}:multi_label={head.label_column} --label-separator {_quoted(separator)}"
        )
    return warnings


def _twins(counts: Mapping[str, int]) -> list[list[str]]:
    groups: dict[str, list[str]] = {}
    for label in counts:
        groups.setdefault(normalize_label(label), []).append(label)
    return [sorted(group) for group in groups.values() if len(group) > 1]


def _missing_values(counts: Mapping[str, int]) -> list[str]:
    found = sorted(label for label in counts if label.lower() in _MISSING)
    others = [label for label in counts if label != "-1"]
    numbers = all(_INTEGER.match(label) and not label.startswith("-") for label in others)
    if "-1" in counts and others and numbers:
        found.append("-1")
    return found


def _joined_by(labels: list[str], *, minimum: int) -> str | None:
    """Return the separator of labels whose parts all occur elsewhere too, if `minimum` are such."""
    alone = set(labels)
    for separator in _SEPARATORS:
        joined = {
            label: [part.strip() for part in label.split(separator)]
            for label in labels
            if separator in label
        }
        parts = Counter(part for found in joined.values() for part in set(found))
        evident = [
            label
            for label, found in joined.items()
            if all(part and (part in alone or parts[part] > 1) for part in found)
        ]
        if len(evident) >= minimum and evident:
            return separator
    return None


def _quoted(separator: str) -> str:
    return f"'{separator}'"


def _fault(head: HeadColumn, message: str) -> Fault:
    return Fault(line=None, field=head.name, message=message)
