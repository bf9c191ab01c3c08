"""Dequantisation against the definition of the blocks, one weight at a time."""

import struct

import numpy as np

from services.cli.pretrained.blocks import q4_0, q4_1, q8_0

NIBBLES = bytes(i | (15 - i) << 4 for i in range(16))  # weights 0..15, then 15..0
VALUES = [*range(16), *range(15, -1, -1)]


def test_q4_0_is_scaled_around_eight() -> None:
    data = struct.pack("<e", 0.5) + NIBBLES
    assert q4_0(data, 32).tolist() == [(value - 8) * 0.5 for value in VALUES]


def test_q4_1_is_scaled_from_its_minimum() -> None:
    data = struct.pack("<ee", 0.25, -2.0) + NIBBLES
    assert q4_1(data, 32).tolist() == [value * 0.25 - 2 for value in VALUES]


def test_q8_0_is_scaled_around_zero() -> None:
    values = list(range(-16, 16))
    data = struct.pack("<e32b", 2.0, *values) * 2
    assert q8_0(data, 64).tolist() == [value * 2.0 for value in values] * 2
    assert q8_0(data, 64).dtype == np.float32
