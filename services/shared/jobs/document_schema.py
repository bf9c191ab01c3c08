"""Schemas of the documents that `shared.memory` describes with the standard library alone.

Before Python 3.12 pydantic takes a TypedDict of `typing_extensions` only, which memory does not
import: `Document[...]` shows pydantic such a copy of each TypedDict.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import UnionType
from typing import (
    Annotated,
    Any,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema
from typing_extensions import NotRequired, TypedDict

Fields = TypeVar("Fields")


class _StandardTypedDict:
    """Annotates a TypedDict of `typing` so that pydantic validates and describes it."""

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return handler.generate_schema(_for_pydantic(source))


Document = Annotated[Fields, _StandardTypedDict()]


def _for_pydantic(kind: Any) -> Any:
    """Return `kind` with every TypedDict in it, at any depth, in the form that pydantic takes."""
    if is_typeddict(kind):
        return _typed_dict(kind)
    arguments = tuple(_for_pydantic(argument) for argument in get_args(kind))
    if not arguments:
        return kind
    origin = get_origin(kind)
    if origin is UnionType:  # X | Y cannot be subscripted
        return reduce(or_, arguments)
    return origin[arguments]


def _typed_dict(kind: Any) -> Any:
    fields = {
        name: _for_pydantic(hint)
        if name in kind.__required_keys__
        else NotRequired[_for_pydantic(hint)]
        for name, hint in get_type_hints(kind).items()
    }
    found = TypedDict(kind.__name__.removesuffix("Dict"), fields)  # type: ignore[misc]
    found.__doc__, found.__module__ = kind.__doc__, kind.__module__
    return found
