"""Limits of a request body that hold before validation: its size, nesting and characters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.api.errors import to_problem
from services.api.problems import (
    MAX_FIELD_ERRORS,
    FieldError,
    ProblemError,
    problem_response,
)
from services.api.settings import ApiSettings

MAX_JSON_DEPTH = 64
INTEGER_BITS = 64  # the width of Postgres's bigint and of our counters


class BodyLimitMiddleware:
    """ASGI middleware that rejects a body over its path's limit, by Content-Length or while it streams."""

    def __init__(self, app: ASGIApp, *, settings: ApiSettings) -> None:
        self._app = app
        self._limits = {
            "/datasets": settings.upload_limit_bytes,
            "/datasets/preview": settings.upload_limit_bytes,
            "/diagnoses": settings.log_limit_bytes,
        }
        self._default_limit = settings.json_limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limits.get(scope["path"], self._default_limit)
        if _content_length(scope) > limit:
            problem = to_problem(_too_large(limit))
            await problem_response(problem, path=scope["path"])(scope, receive, send)
            return
        await self._app(scope, _limited(receive, limit), send)


def _content_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def _limited(receive: Receive, limit: int) -> Receive:
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        if message["type"] == "http.request":
            received += len(message.get("body", b""))
            if received > limit:
                raise _too_large(limit)
        return message

    return receive_limited


def _too_large(limit: int) -> HTTPException:
    # An HTTPException, because FastAPI turns any other exception during body reading into a 400.
    return HTTPException(
        413, f"The body is larger than {limit} bytes.", headers={"Connection": "close"}
    )


async def screen_json(request: Request) -> None:
    """Reject valid JSON that no database column, log or tokenizer accepts (a dependency).

    That is NUL and lone surrogates in strings, NaN and infinities, integers over 64 bits, and nesting
    deeper than MAX_JSON_DEPTH. The framework has already parsed the body and caches it.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (media_type.startswith("application/") and media_type.endswith("json")):
        return
    if not await request.body():
        return
    screen(await request.json())


def screen(value: Any) -> None:
    """Apply the checks of `screen_json` to a parsed JSON value. Raises ProblemError."""
    faults: list[FieldError] = []
    for field, message in _faults(value, path=()):
        faults.append(FieldError(field=".".join(field) or "body", message=message))
        if len(faults) == MAX_FIELD_ERRORS:
            break
    if faults:
        raise ProblemError(
            "invalid-request", f"{faults[0].field}: {faults[0].message}", errors=faults
        )


def _faults(value: Any, *, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if len(path) > MAX_JSON_DEPTH:
        yield path[:3], f"is nested deeper than {MAX_JSON_DEPTH} levels"
        return
    match value:
        case str() if fault := text_fault(value):
            yield path, fault
        case float() if not math.isfinite(value):
            yield path, "is not a finite number"
        case int() if value.bit_length() >= INTEGER_BITS:
            yield path, f"does not fit into {INTEGER_BITS} bits"
        case list():
            for index, item in enumerate(value):
                yield from _faults(item, path=(*path, str(index)))
        case dict():
            for key, item in value.items():
                if fault := text_fault(key):
                    yield path, f"a field name {fault}"
                else:
                    yield from _faults(item, path=(*path, key))


def text_fault(text: str) -> str | None:
    """Return why `text` cannot be stored, or None."""
    if "\x00" in text:
        return "contains a NUL character"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "contains an unpaired surrogate"
    return None
