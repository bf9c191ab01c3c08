"""Exports of annotation tools, flattened to rows of a text and labels."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

Fields = dict[str, Any]


class LeftOut(Exception):
    """A row that the annotators left without a decision, for example one they rejected."""


class Disagreement(ValueError):
    """A row that several annotators labelled differently."""


class Export(str, Enum):
    """An annotation tool and the kind of its export."""

    LABEL_STUDIO = "Label Studio"
    LABEL_STUDIO_MIN = "Label Studio (minimal)"
    DOCCANO = "doccano"
    ARGILLA = "Argilla"
    ARGILLA_FLAT = "Argilla (flat)"
    PRODIGY = "prodigy"

    __str__ = str.__str__


def detect_export(rows: Sequence[Fields]) -> Export | None:
    """Return the tool that wrote these rows, recognised by its keys, or None."""
    if not rows:
        return None
    keys = set(rows[0]).intersection(*rows[1:])
    first = rows[0]
    if isinstance(first.get("data"), dict) and keys & {"annotations", "completions"}:
        return Export.LABEL_STUDIO
    if {"annotation_id", "annotator"} <= keys or {"annotation_id", "lead_time"} <= keys:
        return Export.LABEL_STUDIO_MIN
    if isinstance(first.get("fields"), dict) and isinstance(first.get("responses"), dict):
        return Export.ARGILLA
    if any(key.endswith(".responses") for key in keys):
        return Export.ARGILLA_FLAT
    if {"text", "answer"} <= keys and keys & {"label", "accept", "options", "_task_hash"}:
        return Export.PRODIGY
    labels = "labels" if "labels" in keys else "label"
    if {"id", "text", labels} <= keys and all(isinstance(row[labels], list) for row in rows):
        return Export.DOCCANO
    return None


def flatten(fields: Fields, export: Export) -> Fields:
    """Return the row with its text and its labels as columns. Raises LeftOut and Disagreement."""
    return _FLATTEN[export](fields)


def _label_studio(fields: Fields) -> Fields:
    row = dict(fields["data"]) if isinstance(fields.get("data"), dict) else {}
    annotations = fields.get("annotations", fields.get("completions"))
    found: dict[str, list[Any]] = {}
    for annotation in annotations if isinstance(annotations, list) else []:
        if not isinstance(annotation, dict) or annotation.get("was_cancelled"):
            continue
        results = annotation.get("result")
        choices: dict[str, list[str]] = {}
        for result in results if isinstance(results, list) else []:
            if isinstance(result, dict) and isinstance(result.get("value"), dict):
                value = result["value"].get("choices")
                if isinstance(value, list):
                    choices.setdefault(str(result.get("from_name")), []).extend(value)
        for name, labels in choices.items():
            found.setdefault(name, []).append(sorted(set(map(str, labels))))
    return row | {name: _agreed(name, values) for name, values in found.items()}


def _label_studio_min(fields: Fields) -> Fields:
    return {name: _choices(value) for name, value in fields.items()}


def _choices(value: Any) -> Any:
    if isinstance(value, str) and value.startswith('{"choices"'):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return value
    if isinstance(value, dict) and isinstance(value.get("choices"), list):
        return _unwrapped(value["choices"])
    return value


def _doccano(fields: Fields) -> Fields:
    row = dict(fields)
    for name in ("label", "labels"):
        value = row.get(name)
        if isinstance(value, list):
            if any(isinstance(item, list | dict) for item in value):
                raise Disagreement("has labels of spans of the text, not of the whole text")
            row[name] = _unwrapped(value)
    return row


def _argilla(fields: Fields) -> Fields:
    row = dict(fields["fields"]) if isinstance(fields.get("fields"), dict) else {}
    responses = fields.get("responses")
    for name, answers in (responses if isinstance(responses, dict) else {}).items():
        submitted = [
            answer.get("value")
            for answer in (answers if isinstance(answers, list) else [])
            if isinstance(answer, dict) and answer.get("status", "submitted") == "submitted"
        ]
        row[name] = _agreed(name, submitted)
    return row


def _argilla_flat(fields: Fields) -> Fields:
    row = {}
    for name, value in fields.items():
        question, dot, kind = name.partition(".")
        if kind == "responses":
            states = fields.get(f"{name}.status")
            answers = value if isinstance(value, list) else []
            if isinstance(states, list) and len(states) == len(answers):
                answers = [
                    a for a, state in zip(answers, states, strict=True) if state == "submitted"
                ]
            row[question] = _agreed(question, answers)
        elif not dot:
            row[name] = value
    return row


def _prodigy(fields: Fields) -> Fields:
    if fields.get("answer") != "accept":
        raise LeftOut
    row = dict(fields)
    if isinstance(row.get("accept"), list):
        row["label"] = _unwrapped(row["accept"])
    if isinstance(row.get("spans"), list) and "label" not in row:
        raise Disagreement("has labels of spans of the text, not of the whole text")
    return row


def _agreed(name: str, values: list[Any]) -> Any:
    """Return what all annotators chose, or None where nobody did."""
    if not values:
        return None
    if any(value != values[0] for value in values[1:]):
        shown = ", ".join(json.dumps(value, ensure_ascii=False)[:60] for value in values[:5])
        raise Disagreement(f"was labelled differently by its annotators ({name}: {shown})")
    return _unwrapped(values[0])


def _unwrapped(value: Any) -> Any:
    """Return the item of a list of one, so that single-label heads can read it; None for an empty list."""
    if isinstance(value, list) and len(value) < 2:
        return value[0] if value else None
    return value


_FLATTEN: dict[Export, Callable[[Fields], Fields]] = {
    Export.LABEL_STUDIO: _label_studio,
    Export.LABEL_STUDIO_MIN: _label_studio_min,
    Export.DOCCANO: _doccano,
    Export.ARGILLA: _argilla,
    Export.ARGILLA_FLAT: _argilla_flat,
    Export.PRODIGY: _prodigy,
}
