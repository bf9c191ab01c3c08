"""The OpenAPI document: every error described by the one schema of problems."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from services.api.errors import MEDIA_TYPE, TITLES, Problem

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
            "description": " / ".join(t for s, t in TITLES.values() if s == status),
            "content": {MEDIA_TYPE: {"schema": schema}},
        }
        for status in statuses
    }


def describe(app: FastAPI) -> None:
    """Give the app an OpenAPI document that knows problems instead of FastAPI's own errors."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(
                title=app.title, version=app.version, description=DESCRIPTION, routes=app.routes
            )
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            for unused in ("HTTPValidationError", "ValidationError"):
                schemas.pop(unused, None)
            problem = Problem.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(problem.pop("$defs"))
            schemas["Problem"] = problem
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
