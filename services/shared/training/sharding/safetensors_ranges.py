"""Reading and writing ranges of tensors in safetensors files, without ever holding a whole tensor.

The format: eight bytes of little-endian header length, a JSON header, then the tensors' bytes
(github.com/huggingface/safetensors, README "Format"). The library itself reads slices of rows only;
a rank's part of a flat parameter may start in the middle of a row.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from services.shared.memory.architecture.safetensors_headers import (
    Header,
    TensorHeader,
    read_header,
)

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file

    @property
    def num_elements(self) -> int:
        return prod(self.shape)


class TensorFile:
    """A safetensors file open for reading ranges."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = read_header(path)
        self.metadata, self.entries = header.metadata, _entries(header, path)
        self._fd = os.open(path, os.O_RDONLY)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements [start, stop) of a tensor flattened row by row, in the file's dtype.

        Raises ValueError where the file ends too early.
        """
        entry = self.entries[name]
        stop = entry.num_elements if stop is None else stop
        assert 0 <= start <= stop <= entry.num_elements
        values = torch.empty(stop - start, dtype=entry.dtype)
        view = _bytes(values) if stop > start else memoryview(b"")
        at, done = entry.offset + start * entry.dtype.itemsize, 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], at + done)
            if count == 0:
                raise ValueError(f"{self.path}: the file ends inside tensor {name!r}")
            done += count
        return values


def _bytes(values: Tensor) -> memoryview:
    raw: Any = values.view(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def _entries(header: Header, path: Path) -> dict[str, Entry]:
    try:
        return {
            name: _entry(tensor, data_offset=header.data_offset)
            for name, tensor in header.tensors.items()
        }
    except ValueError as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def _entry(tensor: TensorHeader, *, data_offset: int) -> Entry:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"dtype {tensor.dtype} is not supported")
    entry = Entry(DTYPES[tensor.dtype], tensor.shape, data_offset + tensor.begin)
    num_bytes = entry.num_elements * entry.dtype.itemsize
    if tensor.end - tensor.begin != num_bytes:
        raise ValueError(
            f"a {tensor.dtype} tensor of shape {list(tensor.shape)} does not fill "
            f"{tensor.end - tensor.begin} bytes"
        )
    return entry


@dataclass(frozen=True)
class Layout:
    """Name, type and shape of a tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class TensorWriter:
    """Writes a safetensors file whose tensors arrive one after another, in the order announced."""

    def __init__(
        self, path: Path, layout: Sequence[Layout], metadata: Mapping[str, str] | None = None
    ) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
        at = 0
        for item in layout:
            header[item.name] = {
                "dtype": NAMES[item.dtype],
                "shape": list(item.shape),
                "data_offsets": [at, at + item.num_bytes],
            }
            at += item.num_bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._remaining = list(reversed(layout))
        self.crc32 = 0
        self.num_bytes = 0
        self._put(struct.pack("<Q", len(text)) + text)

    def append(self, values: Tensor) -> None:
        """Write the next tensor. Raises OSError."""
        item = self._remaining.pop()
        assert (values.dtype, values.numel()) == (item.dtype, prod(item.shape)), item
        if values.numel():
            self._put(_bytes(values.detach().cpu().contiguous()))

    def close(self) -> None:
        """Flush the file to disk and close it."""
        assert not self._remaining, (
            f"{len(self._remaining)} tensors were announced but never written"
        )
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close an unfinished file."""
        self._file.close()

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.crc32 = zlib.crc32(data, self.crc32)
        self.num_bytes += len(data)
