"""Functions that the tests call in a sandbox."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

_calls = 0


@dataclass(frozen=True)
class Pair:
    """A number and a text."""

    number: int
    text: str


def double(number: int) -> int:
    return 2 * number


def swap(pair: Pair) -> Pair:
    return Pair(2 * pair.number, pair.text[::-1])


def count(_: str) -> int:
    global _calls
    _calls += 1
    return _calls


def process_id(_: str) -> int:
    return os.getpid()


def loop(_: str) -> int:
    while True:
        pass


def loop_in_a_pattern(length: int) -> bool:
    return re.match(r"(a+)+$", "a" * length + "b") is not None


def sleep(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def allocate(size: int) -> int:
    return len(bytes(size))


def die(number: int) -> int:
    os.kill(os.getpid(), number)
    return 0


def write(path: str) -> int:
    return Path(path).write_text("x" * 10)


def divide(text: str) -> float:
    return 1 / (len(text) - len(text))


def environment(_: str) -> list[str]:
    return [
        name for name, value in os.environ.items() if "HUSH" in name or name.startswith("STILLH")
    ]


def open_files(_: str) -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
