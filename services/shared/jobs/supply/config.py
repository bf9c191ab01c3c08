"""The configs of a model directory: no code of its own, and no number that a library would allocate by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.shared.jobs.supply.directory import Refused, numbers_in, read_object

_LARGEST = 10**12  # of any number: rope_theta reaches 10^8, max_position_embeddings 10^7
_MOST_LABELS = 100_000  # transformers makes a name for each
_CODE = ("auto_map", "custom_pipelines")
_LABEL_COUNTS = ("num_labels", "_num_labels")


def check_configs(directory: Path) -> None:
    """Check config.json, and the config of the tokenizer if there is one. Raises Refused."""
    config = read_object(directory / "config.json")
    _check_no_code(config, "config.json")
    for field, number in numbers_in(config):
        if abs(number) > _LARGEST:
            raise Refused(f"config.json: {field[:100]} is larger than {_LARGEST:.0e}")
    _check_labels(config)
    path = directory / "tokenizer_config.json"
    if path.exists():
        _check_no_code(read_object(path), path.name)


def _check_no_code(config: dict[str, Any], name: str) -> None:
    for field in _CODE:
        if config.get(field):
            model_type = str(config.get("model_type", ""))[:80]
            hint = f" if transformers has {model_type!r}" if model_type else ""
            raise Refused(
                f"{name} names code of its own ({field}), which is never run; remove {field}{hint}"
            )


def _check_labels(config: dict[str, Any]) -> None:
    for field in _LABEL_COUNTS:
        count = config.get(field)
        if isinstance(count, int) and count > _MOST_LABELS:
            raise Refused(f"config.json: {field} is {count:,}, more than {_MOST_LABELS:,}")
    names = config.get("id2label")
    if isinstance(names, dict) and len(names) > _MOST_LABELS:
        raise Refused(f"config.json: id2label has {len(names):,} names, more than {_MOST_LABELS:,}")
