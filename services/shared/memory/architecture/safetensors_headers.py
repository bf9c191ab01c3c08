"""Reading the headers of safetensors files and indices as the JSON they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.shared.memory.errors import InvalidInput

# The format's own limit (safetensors README: headers over 100 MB are refused).
LARGEST_HEADER_BYTES = 100_000_000

_INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raise InvalidInput naming the file otherwise."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput("model", f"{path} is not readable JSON ({error})") from error
    if not isinstance(value, dict):
        raise InvalidInput("model", f"{path} holds no JSON object")
    return value


def directory_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight in a model directory.

    Raises InvalidInput when it has no safetensors weights, or when a shard of its index is missing.
    """
    if (folder / _INDEX).is_file():
        return file_shapes(folder / _INDEX)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidInput(
            "model",
            f"{folder} has no weights",
            accepted="model.safetensors or model.safetensors.index.json with its shards",
        )
    return {name: shape for file in files for name, shape in _header_shapes(file).items()}


def file_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight of a safetensors file, or of all shards of an index."""
    if path.name.endswith(".safetensors"):
        return _header_shapes(path)
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInput("model", f"{path} has no weight_map")
    shapes: dict[str, tuple[int, ...]] = {}
    for shard in sorted({str(file) for file in weight_map.values()}):
        file = path.parent / shard
        if not file.is_file():
            raise InvalidInput("model", f"{path.name} names {shard}, which is not in {path.parent}")
        shapes |= _header_shapes(file)
    return shapes


def _header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    size_bytes = path.stat().st_size
    with path.open("rb") as stream:
        prefix = stream.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > LARGEST_HEADER_BYTES or 8 + length > size_bytes:
            raise InvalidInput(
                "model",
                f"{path} is truncated or no safetensors file: its header should have {length} bytes, "
                f"the file has {size_bytes}",
            )
        text = stream.read(length)
    try:
        header = json.loads(text)
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in tensors.items()}
        ends = [int(entry["data_offsets"][1]) for entry in tensors.values()]
    except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise InvalidInput("model", f"{path} has a damaged safetensors header") from error
    if 8 + length + max(ends, default=0) > size_bytes:
        raise InvalidInput("model", f"{path} is truncated: {size_bytes} bytes, more are announced")
    return shapes
