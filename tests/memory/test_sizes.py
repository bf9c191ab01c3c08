"""Sizes: units are honoured, and what has none is refused."""

import pytest

from services.shared.memory.errors import InvalidInput
from services.shared.memory.sizes import format_size, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("65520MiB", 68_702_699_520),
        ("64GiB", 68_719_476_736),
        ("64GB", 64_000_000_000),
        ("64 gb", 64_000_000_000),
        ("1.5 GiB", 1_610_612_736),
        (".5KiB", 512),
        ("512B", 512),
    ],
)
def test_a_size_is_what_its_unit_says(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("64", "has no unit"),
        ("64GX", "unknown unit"),
        ("lots", "is not a size"),
        ("-1GiB", "is not a size"),
        ("0GiB", "out of range"),
        ("9999999TiB", "out of range"),
        ("", "is not a size"),
        ("9" * 5000 + "GiB", "is not a size"),
    ],
)
def test_a_bad_size_is_refused_with_its_field(text: str, words: str) -> None:
    with pytest.raises(InvalidInput, match=f"device_memory: .*{words}"):
        parse_size(text, field="device_memory")


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (2048, "2.00 KiB"),
        (975_196_672, "930.02 MiB"),
        (2**36, "64.00 GiB"),
    ],
)
def test_a_size_is_written_in_binary_units(size: int, text: str) -> None:
    assert format_size(size) == text
