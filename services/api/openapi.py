"""The OpenAPI document, in which every error response has the problem schema."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypedDict

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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

    @lru_cache(maxsize=1)
    def content() -> bytes:
        return json.dumps(app.openapi(), ensure_ascii=False, separators=(",", ":")).encode()

    async def describe(request: Request) -> Response:  # noqa: ARG001 - Starlette's signature
        return Response(content(), media_type="application/json")

    # Before FastAPI's own route, which serializes the document for each request, and needs no key.
    assert app.openapi_url is not None
    app.router.routes.insert(0, Route(app.openapi_url, describe, include_in_schema=False))


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
