"""The registry of checks that run on two gloo ranks.

A check is a function of the world and a directory of its own; it runs on both ranks and returns JSON.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.shared.training.process import World

Check = Callable[[World, Path], Any]
Measured = Callable[[str], Any]  # the fixture `measured`: the result of a check by name
CHECKS: dict[str, Check] = {}


def check(function: Check) -> Check:
    """Register a check under the name of its function."""
    assert function.__name__ not in CHECKS, function.__name__
    CHECKS[function.__name__] = function
    return function
