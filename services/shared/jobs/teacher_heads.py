"""What a teacher in a directory answers, read before its job is stored; its ranks look again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from services.shared.datasets.card import Head, HeadType

_heads: TypeAdapter[list[Head]] = TypeAdapter(list[Head])


def read_heads(directory: Path, student: Sequence[Head]) -> list[Head] | None:
    """Return the heads of an artifact of ours, or the one of a classifier made elsewhere.

    That one has no name: it takes the name of the student's only head. None where the files do not
    say, or cannot be read.
    """
    try:
        if (directory / "heads.json").exists():
            return _heads.validate_python(_read(directory / "heads.json")["heads"])
        config = _read(directory / "config.json")
        names = config["id2label"]
        labels = [str(names[number]) for number in sorted(names, key=int)]
        many = config.get("problem_type") == "multi_label_classification"
        kind = HeadType.MULTI_LABEL if many else HeadType.SINGLE_LABEL
        name = student[0].name if len(student) == 1 else "labels"
        return [Head(name=name, type=kind, labels=labels)]
    except (OSError, KeyError, TypeError, AttributeError, ValueError, ValidationError):
        return None


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))
