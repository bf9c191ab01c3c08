"""The headers of safetensors files and the indices of sharded checkpoints.

The format: eight bytes of little-endian header length, a JSON header, then the tensors' bytes
(github.com/huggingface/safetensors, README "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.shared.memory.errors import InvalidInput

# The format's own limit (safetensors README: headers over 100 MB are refused).
LARGEST_HEADER_BYTES = 100_000_000
_MOST_DIMENSIONS = 16
_LARGEST_SIZE = 2**53
# Bits of an element (safetensors, src/tensor.rs, enum Dtype); a dtype that is not known here is not checked.
_BITS = {
    **{"BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8},
    **{"I16": 16, "U16": 16, "F16": 16, "BF16": 16},
    **{"I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64},
}


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as the header describes it; `begin` and `end` count bytes from `Header.data_offset`."""

    dtype: str  # the format's name, as "BF16"
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_elements(self) -> int:
        """The product of the shape."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The header of one safetensors file."""

    metadata: dict[str, str]
    tensors: dict[str, TensorHeader]
    data_offset: int  # bytes before the first tensor


INDEX = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; raise InvalidInput naming the file otherwise."""
    value = parse_json(path)
    if not isinstance(value, dict):
        raise InvalidInput("model", f"{path} does not hold a JSON object")
    return value


def parse_json(path: Path) -> Any:
    """Return the JSON value in `path`; raise InvalidInput naming the file otherwise."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidInput("model", f"{path} is not readable JSON ({error})") from error


def directory_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every weight in a model directory.

    Raises InvalidInput when it has no safetensors weights, or when a shard of its index is missing.
    """
    if (folder / INDEX).is_file():
        return file_shapes(folder / INDEX)
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


def read_header(path: Path) -> Header:
    """Return the header of a safetensors file, checked against the file's size.

    Raises OSError, and ValueError for a file that is truncated or is no safetensors file.
    """
    size_bytes = path.stat().st_size
    try:
        with path.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8 or length > min(size_bytes - 8, LARGEST_HEADER_BYTES):
                raise ValueError("its header is longer than the file")
            content = json.loads(stream.read(length))
        metadata = content.pop("__metadata__", {})
        tensors = {name: _tensor_header(entry) for name, entry in content.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a safetensors file, or truncated: {error}") from error
    data_offset = 8 + length
    for name, tensor in tensors.items():
        if data_offset + tensor.end > size_bytes:
            raise ValueError(
                f"{path} is truncated: tensor {name[:100]!r} ends after the file's end"
            )
    _check_layout(path, tensors)
    return Header(metadata=metadata, tensors=tensors, data_offset=data_offset)


def _tensor_header(entry: dict[str, Any]) -> TensorHeader:
    dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    sizes = (*shape, begin, end)
    if len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {len(shape)} dimensions")
    if not all(type(n) is int and 0 <= n <= _LARGEST_SIZE for n in sizes) or begin > end:
        raise ValueError("a shape or an offset is not a size")
    return TensorHeader(str(dtype), tuple(shape), begin, end)


def _check_layout(path: Path, tensors: Mapping[str, TensorHeader]) -> None:
    """Check that each tensor has the bytes of its shape, and shares none. Raises ValueError."""
    end = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        shown = name[:100]
        bits = _BITS.get(tensor.dtype)
        if bits is not None and tensor.num_elements * bits != 8 * (tensor.end - tensor.begin):
            raise ValueError(
                f"{path} states a false size: tensor {shown!r} of {tensor.dtype} has "
                f"{tensor.end - tensor.begin:,} bytes, which its shape does not have"
            )
        if tensor.begin < end:
            raise ValueError(f"{path} states a false layout: tensor {shown!r} overlaps another")
        end = max(end, tensor.end)


def _header_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    try:
        header = read_header(path)
    except ValueError as error:
        raise InvalidInput("model", str(error)) from error
    return {name: tensor.shape for name, tensor in header.tensors.items()}
