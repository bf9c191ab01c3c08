"""Unpacked archives: folders of text files by class, `save_to_disk` directories, one file per split."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.shared.datasets.card import Split
from services.shared.datasets.formats.arrow_tables import class_label_features
from services.shared.datasets.formats.encoding import detect_encoding
from services.shared.datasets.formats.records import MAX_LINE_BYTES, Record
from services.shared.datasets.upload import Fault

_SPLIT_NAMES = {
    "train": Split.TRAIN,
    "training": Split.TRAIN,
    "valid": Split.VALIDATION,
    "val": Split.VALIDATION,
    "validation": Split.VALIDATION,
    "dev": Split.VALIDATION,
    "eval": Split.VALIDATION,
    "test": Split.TEST,
    "testing": Split.TEST,
}


@dataclass(frozen=True)
class Member:
    """A file of an archive, and the split that its name or its folder states."""

    path: Path
    name: str
    split: Split | None


def parse_split(value: Any) -> Split | None:
    """Return the split that a value of a split column stands for, or None."""
    return _SPLIT_NAMES.get(value.strip().lower()) if isinstance(value, str) else None


def list_members(directory: Path) -> list[Member]:
    """Return the files of an unpacked archive in the order of splits, then of names."""
    members = []
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            relative = path.relative_to(directory)
            members.append(Member(path, relative.as_posix(), _split_of(relative)))
    order = list(Split)
    return sorted(members, key=lambda m: (order.index(m.split) if m.split else 9, m.name))


def _split_of(relative: Path) -> Split | None:
    words = re.split(r"[^a-z]+", relative.name.lower().split(".")[0])
    found = {_SPLIT_NAMES[word] for word in words if word in _SPLIT_NAMES}
    if len(found) == 1:
        return found.pop()
    for folder in relative.parts[:-1]:
        if split := parse_split(folder):
            return split
    return None


def is_class_folders(members: list[Member]) -> bool:
    """Return whether the files are text files in at least two folders, one for each class."""
    texts = [member for member in members if member.name.lower().endswith(".txt")]
    return len(texts) == len(members) > 1 and len({class_of(m) for m in texts} - {None}) > 1


def class_of(member: Member) -> str | None:
    """Return the folder of a text file, which is its class."""
    parts = member.name.split("/")
    return parts[-2] if len(parts) > 1 and parse_split(parts[-2]) is None else None


def read_class_folders(members: list[Member], *, encoding: str | None) -> Iterator[Record | Fault]:
    """Yield `text` and `label` of each file; `Record.line` is the number of the file from 1."""
    for number, member in enumerate(members, 1):
        with member.path.open("rb") as file:
            raw = file.read(MAX_LINE_BYTES + 1)
        if len(raw) > MAX_LINE_BYTES:
            message = f"{member.name[:200]} is longer than {MAX_LINE_BYTES:,} bytes"
            yield Fault(line=number, field=None, message=message)
            continue
        name = encoding or detect_encoding(member.path).name
        try:
            text = raw.decode(name).removeprefix("\ufeff")
        except UnicodeDecodeError:
            message = f"{member.name[:200]} is not {name.upper()}; give the encoding (--encoding)"
            yield Fault(line=number, field=None, message=message)
            continue
        yield Record(number, {"text": text, "label": class_of(member)}, member.split)


def saved_class_names(directory: Path) -> dict[str, list[str]]:
    """Return the names of ClassLabel features in the `dataset_info.json` of a `save_to_disk` directory."""
    for path in sorted(directory.rglob("dataset_info.json")):
        try:
            info = json.loads(path.read_bytes()[:MAX_LINE_BYTES])
        except (ValueError, RecursionError):
            continue
        if isinstance(info, dict):
            return class_label_features(info.get("features"))
    return {}
