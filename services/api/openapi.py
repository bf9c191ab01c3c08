"""The OpenAPI document: every error described by the one schema of problems."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from services.api.problems import MEDIA_TYPE, PROBLEM_TYPES

Responses = dict[int | str, dict[str, Any]]

DESCRIPTION = """\
Fine-tunes a large teacher, distils it into a small student, serves the promoted student, and tells the
truth about accelerator memory. Every error is a problem document (RFC 9457).
"""


def problems(*statuses: int) -> Responses:
    """Return OpenAPI responses for the problems that a route may answer with."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {
            "description": " / ".join(t for s, t in PROBLEM_TYPES.values() if s == status),
            "content": {MEDIA_TYPE: {"schema": schema}},
        }
        for status in statuses
    }


def describe(app: FastAPI, *, models: Sequence[type[BaseModel]]) -> None:
    """Give the app an OpenAPI document that knows problems instead of FastAPI's own errors.

    `models` are those that routes refer to by `$ref` alone.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            for model in models:
                schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas.update(schema.pop("$defs", {}))
                schemas[model.__name__] = schema
            if app.state.context.keys.is_empty:
                _drop_security(document)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def links(parameter: str, *operations: str) -> dict[str, Any]:
    """Return OpenAPI links: the `id` of this response is the `parameter` of those operations."""
    parameters = {parameter: "$response.body#/id"}
    return {name: {"operationId": name, "parameters": parameters} for name in operations}


def _drop_security(document: dict[str, Any]) -> None:
    """Let the document of a server without keys ask for none."""
    document["components"].pop("securitySchemes", None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation.pop("security", None)
