"""Parses and formats sizes in bytes."""

import re

from services.shared.memory.errors import InvalidInput

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]*)\s*$")
_LONGEST_SIZE = 40  # characters; longer digits than Python converts would raise ValueError
_ACCEPTED = "a number with a unit, such as 65520MiB, 64GiB or 64GB (GiB is 2^30, GB is 10^9)"

# No accelerator or host of one node holds a pebibyte; beyond it a unit was mistyped.
LARGEST_SIZE_BYTES = 2**50


def parse_size(text: str, *, field: str = "size") -> int:
    """Return the bytes that `text` names; 64GB and 64GiB differ.

    Raises InvalidInput without a unit, with an unknown one, or for zero and for sizes out of range.
    """
    if len(text) > _LONGEST_SIZE:
        raise InvalidInput(field, f"{text[:_LONGEST_SIZE]!r}... is not a size", accepted=_ACCEPTED)
    found = _SIZE.match(text)
    if found is None:
        raise InvalidInput(field, f"{text!r} is not a size", accepted=_ACCEPTED)
    number, unit = found.groups()
    if not unit:
        raise InvalidInput(field, f"{text!r} has no unit", accepted=_ACCEPTED)
    if unit.lower() not in _UNITS:
        raise InvalidInput(field, f"{text!r} has an unknown unit {unit!r}", accepted=_ACCEPTED)
    return check_size(_exact_bytes(number, _UNITS[unit.lower()]), field=field)


def check_size(size_bytes: int, *, field: str) -> int:
    """Return `size_bytes` unchanged; raise InvalidInput when it is out of range."""
    if isinstance(size_bytes, bool) or not isinstance(size_bytes, int):
        raise InvalidInput(field, f"{size_bytes!r} is not a whole number of bytes")
    if not 0 < size_bytes <= LARGEST_SIZE_BYTES:
        raise InvalidInput(field, f"{size_bytes} bytes is out of range", accepted="1 B to 1024 TiB")
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Format bytes as torch's out-of-memory messages do: binary units, two decimals."""
    magnitude = abs(size_bytes)
    for name, unit in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if magnitude >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} B"


def _exact_bytes(number: str, unit: int) -> int:
    whole, _, fraction = number.partition(".")
    scaled = int(whole or 0) * unit
    if fraction:
        scaled += int(fraction) * unit // 10 ** len(fraction)
    return scaled
