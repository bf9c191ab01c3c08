"""The files of a model directory: their kinds, their sizes, and the JSON in them."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIB = 2**20
_MAX_ENTRIES = 10_000
_MAX_DEPTH = 32
# Many times the largest of published models: a config has kilobytes, the tokenizer.json of Gemma 3 33 MB.
_MAX_BYTES = {
    "config.json": 4 * MIB,
    "generation_config.json": MIB,
    "tokenizer.json": 96 * MIB,
    "tokenizer.model": 32 * MIB,
    "spiece.model": 32 * MIB,
    "vocab.json": 32 * MIB,
    "vocab.txt": 32 * MIB,
    "merges.txt": 32 * MIB,
    "heads.json": 64 * MIB,
    "golden.json": 64 * MIB,
    "manifest.json": 16 * MIB,
    "model.safetensors.index.json": 64 * MIB,
}
_MAX_OTHER_JSON_BYTES = 32 * MIB


class Refused(ValueError):
    """A model directory is not loaded; the message is one sentence about one of its files."""


def check_files(directory: Path) -> None:
    """Check the number, kinds and sizes of the files, and that none is code. Raises Refused."""
    for number, path in enumerate(sorted(directory.iterdir())):
        if number >= _MAX_ENTRIES:
            raise Refused(f"it has more than {_MAX_ENTRIES:,} files")
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            continue
        name = path.name[:100]
        if not stat.S_ISREG(status.st_mode):
            raise Refused(f"{name!r} is not a regular file")
        if path.suffix == ".py":
            raise Refused(f"{name!r} is code, which is never run; remove it")
        limit = _MAX_BYTES.get(path.name)
        if limit is None and path.suffix == ".json":
            limit = _MAX_OTHER_JSON_BYTES
        if limit is not None and status.st_size > limit:
            raise Refused(
                f"{name!r} has {status.st_size:,} bytes, more than the {limit:,} that are read"
            )


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file whose size has been checked. Raises Refused."""
    try:
        value = json.loads(path.read_bytes())
    except RecursionError as error:
        raise Refused(f"{path.name} is nested too deeply") from error
    except ValueError as error:
        raise Refused(f"{path.name} is not readable JSON ({str(error)[:100]})") from error
    if not isinstance(value, dict):
        raise Refused(f"{path.name} does not hold a JSON object")
    return value


def numbers_in(value: Any, *, field: str = "", depth: int = 0) -> Iterator[tuple[str, float]]:
    """Yield each number with its field. Raises Refused for deep nesting and what is not finite."""
    if depth > _MAX_DEPTH:
        raise Refused(f"{field[:100]} is nested deeper than {_MAX_DEPTH} levels")
    match value:
        case bool():
            return
        case int():
            yield field, value
        case float():
            if not math.isfinite(value):
                raise Refused(f"{field[:100]} is not a finite number")
            yield field, value
        case list():
            for item in value:
                yield from numbers_in(item, field=field, depth=depth + 1)
        case dict():
            for name, item in value.items():
                inner = f"{field}.{name}" if field else str(name)
                yield from numbers_in(item, field=inner, depth=depth + 1)
