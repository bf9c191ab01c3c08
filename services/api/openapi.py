"""The OpenAPI document, in which every error response has the problem schema."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from services.api.problems import MEDIA_TYPE, PROBLEM_TYPES

Responses = dict[int | str, dict[str, Any]]

DESCRIPTION = """\
Fine-tunes a large teacher, distils it into a small student, serves the promoted student, and predicts and
explains accelerator memory. Every error is a problem document (RFC 9457).
"""


class Link(TypedDict):
    """An OpenAPI link: an operation, and where its parameters come from."""

    operationId: str
    parameters: dict[str, str]


def problems(*statuses: int) -> Responses:
    """Return the OpenAPI responses for the problem statuses of a route."""
    schema = {"$ref": "#/components/schemas/Problem"}
    return {
        status: {
            "description": " / ".join(t for s, t in PROBLEM_TYPES.values() if s == status),
            "content": {MEDIA_TYPE: {"schema": schema}},
        }
        for status in statuses
    }


def install_openapi(app: FastAPI, *, models: Sequence[type[BaseModel]]) -> None:
    """Replace FastAPI's error schemas in the app's OpenAPI document with the problem schema.

    `models` are those that routes refer to only by `$ref`.
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


def links(parameter: str, *operations: str) -> dict[str, Link]:
    """Return OpenAPI links that pass the `id` of a response as `parameter` to `operations`."""
    parameters = {parameter: "$response.body#/id"}
    return {name: {"operationId": name, "parameters": parameters} for name in operations}


def _drop_security(document: dict[str, Any]) -> None:
    """Remove the security schemes from the document of a server without keys."""
    document["components"].pop("securitySchemes", None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation.pop("security", None)
