"""What a request body may be before anybody looks at its meaning: its size, and its characters."""

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
INTEGER_BITS = 64  # what Postgres, JavaScript's BigInt64 and our counters agree on


class BodyLimitMiddleware:
    """ASGI middleware that refuses a body over its path's limit, by its header or while it streams."""

    def __init__(self, app: ASGIApp, *, settings: ApiSettings) -> None:
        self._app = app
        self._limits = {
            "/datasets": settings.upload_limit_bytes,
            "/diagnoses": settings.log_limit_bytes,
        }
        self._otherwise = settings.json_limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        limit = self._limits.get(scope["path"], self._otherwise)
        if _announced(scope) > limit:
            problem = to_problem(_too_large(limit))
            await problem_response(problem, path=scope["path"])(scope, receive, send)
            return
        await self._app(scope, _counted(receive, limit), send)


def _announced(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


def _counted(receive: Receive, limit: int) -> Receive:
    seen = 0

    async def counted() -> Message:
        nonlocal seen
        message = await receive()
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            if seen > limit:
                raise _too_large(limit)
        return message

    return counted


def _too_large(limit: int) -> HTTPException:
    # An HTTPException, because FastAPI turns any other exception while reading a body into a 400.
    return HTTPException(
        413, f"The body is larger than {limit} bytes.", headers={"Connection": "close"}
    )


async def screen_json(request: Request) -> None:
    """Refuse what JSON's grammar lets through but no column, log or tokenizer takes.

    NUL and lone surrogates in strings, NaN and infinities, integers over 64 bits, and nesting deeper
    than MAX_JSON_DEPTH. The body is already parsed (and kept) by the framework.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if not (media_type.startswith("application/") and media_type.endswith("json")):
        return
    if not await request.body():
        return
    screen(await request.json())


def screen(value: Any) -> None:
    """Refuse what `screen_json` tells of, in a value that JSON was read into. Raises ProblemError."""
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
        yield path[:3], f"nested deeper than {MAX_JSON_DEPTH} levels"
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
                    yield path, f"a field's name {fault}"
                else:
                    yield from _faults(item, path=(*path, key))


def text_fault(text: str) -> str | None:
    """Return what makes `text` unfit for storage, or None."""
    if "\x00" in text:
        return "contains the character NUL"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "contains half of a surrogate pair, which is no character"
    return None
