"""A fast path for the prediction routes, which bypasses FastAPI's routing and dependency injection.

FastAPI's work per request (matching nested routers, exit stacks, resolving dependencies) took half of
the CPU time of a prediction with a null engine: 0.15 of 0.28 ms, measured in process on a Zen 4 with
fastapi 0.165. FastAPI documents a fast route like any other; `FastRouteMiddleware` serves it, checking
key, body and alias in this order. docs/decisions/0003-fast-prediction-routes.md has the measurements.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any, get_type_hints

from fastapi import Depends, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import StringConstraints, TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from services.api.auth.callers import authorize, requires
from services.api.auth.keys import Scope
from services.api.deps import ALIAS_PATTERN, AppContext
from services.api.errors import HANDLED_EXCEPTIONS, handle_exception
from services.api.limits.body import screen
from services.api.problems import ProblemError, invalid_field
from services.shared.jobs.db.model_queries import DEFAULT_ALIAS

# More than any valid request has; each unknown field would cost an error message of its own.
MAX_FIELDS = 50

# For the OpenAPI document only: `handler_for` checks the key. A fast route runs no other dependency.
PREDICT_SCOPE = Depends(requires(Scope.PREDICT))

_AliasName = TypeAdapter(Annotated[str, StringConstraints(pattern=ALIAS_PATTERN)])

Handler = Callable[[Request], Awaitable[Response]]


class FastRoute(APIRoute):
    """Serves an endpoint with the signature (body, request, context, alias)."""

    def get_route_handler(self) -> Any:
        """Return the handler that FastAPI and `FastRouteMiddleware` call."""
        assert self.dependencies == [PREDICT_SCOPE], "a fast route runs no other dependency"
        return handler_for(self.endpoint)


def handler_for(endpoint: Callable[..., Awaitable[Response]]) -> Handler:
    """Return a handler that checks a request's key, body and alias, then calls `endpoint`."""
    body_type = TypeAdapter(get_type_hints(endpoint)["body"])

    async def handle(request: Request) -> Response:
        context: AppContext = request.app.state.context
        authorize(request, Scope.PREDICT)
        body = _parse_request(
            await _read_body(request),
            media_type=request.headers.get("content-type", ""),
            body_type=body_type,
            max_items=context.settings.predict_most_texts,
        )
        return await endpoint(body=body, request=request, context=context, alias=_alias(request))

    return handle


class FastRouteMiddleware:
    """ASGI middleware that dispatches requests for fast routes before the router sees them."""

    def __init__(self, app: ASGIApp, *, routes: list[APIRoute]) -> None:
        self._app = app
        self._routes = {
            (method, route.path): (route, route.get_route_handler())
            for route in routes
            for method in route.methods or ()
        }

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        found = None
        if scope["type"] == "http":
            found = self._routes.get((scope["method"], scope["path"]))
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["route"], handle = found
        request = Request(scope, receive, send)
        try:
            response = await handle(request)
        except HANDLED_EXCEPTIONS as error:
            response = await handle_exception(request, error)
        await response(scope, receive, send)


async def _read_body(request: Request) -> bytes:
    chunks = []
    more = True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        chunks.append(message.get("body", b""))
        more = message.get("more_body", False)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _parse_request(
    content: bytes, *, media_type: str, body_type: TypeAdapter[Any], max_items: int
) -> Any:
    """Return the validated body. Raises ProblemError, RequestValidationError, HTTPException."""
    if not content:
        raise RequestValidationError(
            [{"type": "missing", "loc": ("body",), "msg": "Field required"}]
        )
    value = _parse_json(content) if _is_json(media_type) else content
    if isinstance(value, dict):
        # Check sizes before validation: a million error messages take seconds.
        _check_counts(value, max_items)
    try:
        body = body_type.validate_python(value, from_attributes=True)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        errors = [{**item, "loc": ("body", *item["loc"])} for item in found]
        raise RequestValidationError(errors, body=value) from error
    screen(value)
    return body


def _parse_json(content: bytes) -> Any:
    with suppress(ValueError):
        return from_json(content, cache_strings="keys")  # 5 MB in 1 ms; json takes 20
    # Not strict JSON: json reports the position, and accepts values that `screen` then names.
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        invalid = {"type": "json_invalid", "loc": ("body", error.pos), "ctx": {"error": error.msg}}
        raise RequestValidationError([invalid]) from error
    except (ValueError, RecursionError) as error:  # not UTF-8, too many digits, nested too deeply
        raise HTTPException(400) from error


def _is_json(media_type: str) -> bool:
    if media_type == "application/json":
        return True
    kind = media_type.partition(";")[0].strip().lower()
    return kind.startswith("application/") and (kind.endswith("/json") or kind.endswith("+json"))


def _check_counts(value: dict[str, object], max_items: int) -> None:
    if len(value) > MAX_FIELDS:
        raise invalid_field(
            "body", f"has {len(value)} fields; no request has more than {MAX_FIELDS}"
        )
    for name, item in value.items():
        if isinstance(item, list) and len(item) > max_items:
            raise ProblemError(
                "too-large", f"{name[:80]}: {len(item)} items; one request may have {max_items}."
            )


def _alias(request: Request) -> str:
    if not request.scope["query_string"]:
        return DEFAULT_ALIAS
    try:
        return _AliasName.validate_python(request.query_params.get("alias", DEFAULT_ALIAS))
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise RequestValidationError(
            [{**item, "loc": ("query", "alias")} for item in found]
        ) from error
