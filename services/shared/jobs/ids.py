"""Ids: a prefix for the kind of resource, and a body that sorts by creation time."""

from __future__ import annotations

import secrets
import threading
import time
from typing import Literal

Prefix = Literal["ds", "job", "mdl", "prm"]

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"  # Crockford's base 32: no i, l, o, u
_BODY_LENGTH = 26  # 130 bits hold 48 of milliseconds and 80 random ones, as a ULID does
_RANDOM_BITS = 80

_lock = threading.Lock()
_last = 0


def new_id(prefix: Prefix) -> str:
    """Return a new id, for example `job_01k3c9...`; ids of one process sort in order of creation."""
    global _last
    with _lock:
        fresh = (time.time_ns() // 1_000_000) << _RANDOM_BITS | secrets.randbits(_RANDOM_BITS)
        # Within a millisecond, and when the clock steps back, count up instead of drawing random bits.
        _last = fresh if fresh >> _RANDOM_BITS > _last >> _RANDOM_BITS else _last + 1
        return f"{prefix}_{_base32(_last)}"


def model_id_of(job_id: str, attempt: int) -> str:
    """Return the id of the model that this attempt makes if it succeeds.

    The directory of the model has the same name, so no attempt can write over another's result.
    """
    return f"mdl_{job_id.removeprefix('job_')}_{attempt}"


def new_token() -> str:
    """Return a claim's token: the worker that has it holds the lease."""
    return secrets.token_hex(16)


def _base32(number: int) -> str:
    digits = []
    for _ in range(_BODY_LENGTH):
        number, digit = divmod(number, 32)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
