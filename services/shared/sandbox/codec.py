"""Calls as bytes: JSON of the types that a function's annotations name, and never a pickle.

A process that has read a hostile file may be under its control, so what it returns is parsed as data.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, get_type_hints

from pydantic import TypeAdapter

_OURS = ("services.", "tests.")

Function = Callable[[Any], Any]


def name_of(function: Function) -> str:
    """Return the name under which `function_named` finds a module-level function."""
    return f"{function.__module__}:{function.__qualname__}"


def function_named(name: str) -> Function:
    """Return one of our functions by its name. Raises ValueError for any other."""
    module, _, attribute = name.partition(":")
    if not module.startswith(_OURS):
        raise ValueError(f"{name} is not one of our functions")
    function: Function = getattr(importlib.import_module(module), attribute)
    return function


@lru_cache(maxsize=64)
def argument_type(function: Function) -> TypeAdapter[Any]:
    """Return the type of the one argument of a function."""
    hints = get_type_hints(function, include_extras=True)
    (hint,) = (hint for name, hint in hints.items() if name != "return")
    return TypeAdapter(hint)


@lru_cache(maxsize=64)
def result_type(function: Function) -> TypeAdapter[Any]:
    """Return the type of the result of a function."""
    return TypeAdapter(get_type_hints(function, include_extras=True)["return"])
