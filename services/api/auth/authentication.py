"""Authenticates requests before their bodies are read, so unauthenticated clients cannot trigger parsing."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.auth.callers import authenticate
from services.api.problems import ProblemError, problem_response

# Probes, the API description and the console's page. Everything else needs a key, including paths that do
# not exist, except below CONSOLE_PATH.
PUBLIC_PATHS = frozenset(
    {
        "/",
        "/livez",
        "/readyz",
        "/health",
        "/openapi.json",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
    }
)


CONSOLE_PATH = "/console/"  # the files of the console, which hold nothing of anybody


def is_public(path: str) -> bool:
    """Return whether a path needs no key."""
    return path in PUBLIC_PATHS or path.startswith(CONSOLE_PATH)


class AuthenticationMiddleware:
    """ASGI middleware that requires a valid key, whatever its scopes; the routes check those.

    FastAPI reads and parses a body before it resolves a route's dependencies, which would be too late.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_public(scope["path"]):
            try:
                authenticate(Request(scope))
            except ProblemError as problem:
                # The body stays unread, so the connection cannot be reused.
                problem.headers["Connection"] = "close"
                await problem_response(problem, path=scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)
