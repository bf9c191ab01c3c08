"""Dequantisation of the 4-bit and 8-bit blocks of 32 weights that ggml defines.

Legend: B blocks. Layouts: ggml's `ggml-common.h`, `block_q4_0`, `block_q4_1`, `block_q8_0`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WEIGHTS_PER_BLOCK = 32
Floats = npt.NDArray[np.float32]

_Q4_0 = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("nibbles", "u1", 16)])
_Q8_0 = np.dtype([("scale", "<f2"), ("values", "i1", 32)])


def q4_0(data: bytes | memoryview, num_weights: int) -> Floats:
    """Return `(nibble - 8) * scale` for each weight."""
    blocks = np.frombuffer(data, _Q4_0, num_weights // WEIGHTS_PER_BLOCK)
    scale = blocks["scale"].astype(np.float32)[:, None]
    return ((_nibbles(blocks["nibbles"]) - 8) * scale).reshape(-1)


def q4_1(data: bytes | memoryview, num_weights: int) -> Floats:
    """Return `nibble * scale + minimum` for each weight."""
    blocks = np.frombuffer(data, _Q4_1, num_weights // WEIGHTS_PER_BLOCK)
    scale = blocks["scale"].astype(np.float32)[:, None]
    minimum = blocks["minimum"].astype(np.float32)[:, None]
    return (_nibbles(blocks["nibbles"]) * scale + minimum).reshape(-1)


def q8_0(data: bytes | memoryview, num_weights: int) -> Floats:
    """Return `value * scale` for each weight."""
    blocks = np.frombuffer(data, _Q8_0, num_weights // WEIGHTS_PER_BLOCK)
    scale = blocks["scale"].astype(np.float32)[:, None]
    return (blocks["values"].astype(np.float32) * scale).reshape(-1)


def _nibbles(packed: npt.NDArray[np.uint8]) -> Floats:
    """Return the 32 nibbles of each block [B, 32]: the low ones of all bytes, then the high ones."""
    return np.concatenate([packed & 0x0F, packed >> 4], axis=1).astype(np.float32)
