"""pydantic schemas of documents that are TypedDicts of the standard library.

Before Python 3.12 pydantic accepts a TypedDict of `typing_extensions` only, which `shared.memory`
does not import: `Document[...]` gives pydantic such a copy of each TypedDict. `StoredDocument[...]`
describes a document in the same way, but does not validate its fields.
"""

from __future__ import annotations

from functools import cache, reduce
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
from pydantic_core import CoreSchema, core_schema
from typing_extensions import NotRequired, TypedDict

Fields = TypeVar("Fields")


class _StandardTypedDict:
    """Annotates a TypedDict of `typing` so that pydantic validates and describes it."""

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return handler.generate_schema(_for_pydantic(source))


class _StoredTypedDict:
    """Annotates a TypedDict whose values pydantic describes and passes through unchanged."""

    def __get_pydantic_core_schema__(
        self, source: type, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            _unchanged,
            handler.generate_schema(_for_pydantic(source)),
            serialization=core_schema.plain_serializer_function_ser_schema(_same),
        )


Document = Annotated[Fields, _StandardTypedDict()]

# Of a document that an older version may have stored, with other fields or in another order.
StoredDocument = Annotated[Fields, _StoredTypedDict()]


def _unchanged(value: Any, _validate: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _same(value: Any) -> Any:
    return value


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


@cache  # one class for each, so that OpenAPI has one schema of it
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
