"""Reads the metadata and the tensors of a GGUF file, as far as small Llama models in 4 and 8 bits need it.

Format: ggml's `docs/gguf.md`, version 3, little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from services.cli.pretrained import blocks
from services.cli.pretrained.blocks import Floats
from services.cli.pretrained.errors import UnreadableWeights

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_F32, _Q4_1, _Q8_0 = 0, 3, 8
_BLOCK_BYTES = {_Q4_1: 20, _Q8_0: 34}
_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufFile:
    """The content of the file; tensors are dequantised and shaped [rows, columns]."""

    metadata: dict[str, Any]
    tensors: dict[str, Floats]


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, length = self.scalar("I"), self.scalar("Q")
            return [self.value(element) for _ in range(length)]
        return self.scalar(_SCALARS[kind])


def read_gguf(path: Path) -> GgufFile:
    """Read the whole file. Raises UnreadableWeights, OSError."""
    cursor = _Cursor(path.read_bytes())
    if cursor.data[:4] != b"GGUF":
        raise UnreadableWeights(f"{path} does not begin with GGUF")
    cursor.at = 8
    num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(num_entries):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    headers = [_header(cursor) for _ in range(num_tensors)]
    start = -(-cursor.at // _ALIGNMENT) * _ALIGNMENT
    return GgufFile(
        metadata,
        {
            name: _tensor(cursor.data, shape=shape, kind=kind, at=start + offset)
            for name, shape, kind, offset in headers
        },
    )


def _header(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))
    return name, shape[::-1], cursor.scalar("I"), cursor.scalar("Q")


def _tensor(data: bytes, *, shape: tuple[int, ...], kind: int, at: int) -> Floats:
    size = prod(shape)
    if kind == _F32:
        return np.frombuffer(data, "<f4", size, at).reshape(shape)
    if kind not in _BLOCK_BYTES:
        raise UnreadableWeights(f"GGUF tensor type {kind} is not supported")
    num_bytes = size // blocks.WEIGHTS_PER_BLOCK * _BLOCK_BYTES[kind]
    dequantise = blocks.q4_1 if kind == _Q4_1 else blocks.q8_0
    return dequantise(memoryview(data)[at : at + num_bytes], size).reshape(shape)
