"""The base models of the server: the model directories below its model roots, for people who choose one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

_MAX_DEPTH = 4  # below a root
_MAX_MODELS = 200
_MAX_DIRECTORIES = 5000  # that are looked into
_MAX_CONFIG_BYTES = 1024 * 1024


class BaseModelView(BaseModel):
    """A directory that a spec may name; whether it is fit for a job is checked when it is planned."""

    path: str  # as a spec names it: relative to its model root
    model_type: str | None
    size_bytes: int  # of its safetensors


def list_base_models(roots: list[Path]) -> list[BaseModelView]:
    """Return the directories with a config and safetensors below the roots, by path."""
    found: dict[str, BaseModelView] = {}
    for root in roots:
        for directory in _directories(root):
            path = directory.relative_to(root).as_posix()
            weights = [file for file in directory.glob("*.safetensors") if file.is_file()]
            if not weights or path in found or not (directory / "config.json").is_file():
                continue
            found[path] = BaseModelView(
                path=path,
                model_type=_model_type(directory / "config.json"),
                size_bytes=sum(file.stat().st_size for file in weights),
            )
            if len(found) == _MAX_MODELS:
                return list(found.values())
    return [found[path] for path in sorted(found)]


def _directories(root: Path) -> Iterator[Path]:
    """Yield the directories below a root, without following links; neither hidden nor too many."""
    waiting, seen = [(root, 0)], 0
    while waiting:
        directory, depth = waiting.pop()
        try:
            entries = sorted(directory.iterdir(), reverse=True)
        except OSError:
            continue
        for entry in entries:
            if entry.name.startswith(".") or entry.is_symlink() or not entry.is_dir():
                continue
            seen += 1
            if seen > _MAX_DIRECTORIES:
                return
            yield entry
            if depth + 1 < _MAX_DEPTH:
                waiting.append((entry, depth + 1))


def _model_type(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            config = json.loads(file.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    found = config.get("model_type") if isinstance(config, dict) else None
    return found[:80] if isinstance(found, str) else None
