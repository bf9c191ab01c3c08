"""Checks JSON against the schemas of an OpenAPI document, as far as this API uses JSON Schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


class SchemaCheck:
    """The schemas of one OpenAPI document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._paths = document["paths"]
        self.components: dict[str, Any] = document["components"]["schemas"]

    def response(self, method: str, path: str) -> dict[str, Any]:
        """Return the schema of a successful response."""
        content = self._paths[path][method]["responses"]["200"]["content"]
        schema: dict[str, Any] = content["application/json"]["schema"]
        return schema

    def names(self, schema: dict[str, Any]) -> set[str]:
        """Return the names of the components that a schema refers to, itself or as an alternative."""
        alternatives = schema.get("anyOf", [schema])
        return {one["$ref"].rsplit("/", 1)[1] for one in alternatives if "$ref" in one}

    def check(self, value: Any, schema: dict[str, Any]) -> None:
        """Raise AssertionError with the place where `value` is not as described."""
        fault = self._fault(value, schema, "$")
        assert fault is None, fault

    def _fault(self, value: Any, schema: dict[str, Any], at: str) -> str | None:
        if "$ref" in schema:
            return self._fault(value, self.components[schema["$ref"].rsplit("/", 1)[1]], at)
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if alternatives:
            faults = [self._fault(value, one, at) for one in alternatives]
            return None if None in faults else "; or ".join(str(fault) for fault in faults)
        kind = schema.get("type")
        is_bool = isinstance(value, bool)
        if kind and (not isinstance(value, _TYPES[kind]) or (is_bool and kind != "boolean")):
            return f"{at}: {value!r} is not of type {kind}"
        if "enum" in schema and value not in schema["enum"]:
            return f"{at}: {value!r} is not one of {schema['enum']}"
        if "const" in schema and value != schema["const"]:
            return f"{at}: {value!r} is not {schema['const']!r}"
        return next(self._faults_inside(value, schema, at), None)

    def _faults_inside(self, value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
        if isinstance(value, dict):
            missing = [name for name in schema.get("required", ()) if name not in value]
            if missing:
                yield f"{at}: {missing} are missing"
            known = schema.get("properties", {})
            others = schema.get("additionalProperties", True)
            for name, item in value.items():
                found = known.get(name, others)
                if found is False:
                    yield f"{at}.{name}: is not described"
                if isinstance(found, dict):
                    yield from self._some(self._fault(item, found, f"{at}.{name}"))
        if isinstance(value, list) and "items" in schema:
            for number, item in enumerate(value):
                yield from self._some(self._fault(item, schema["items"], f"{at}[{number}]"))

    @staticmethod
    def _some(fault: str | None) -> list[str]:
        return [] if fault is None else [fault]
