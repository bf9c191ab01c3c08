"""Authenticates requests before their bodies are read, so unauthenticated clients cannot trigger parsing."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.auth.callers import authenticate
from services.api.problems import ProblemError, problem_response

# Probes and the API description. Everything else needs a key, including paths that do not exist.
PUBLIC_PATHS = frozenset(
    {
        "/livez",
        "/readyz",
        "/health",
        "/openapi.json",
        "/docs",
        "/docs/oauth2-redirect",
        "/redoc",
    }
)


class AuthenticationMiddleware:
    """ASGI middleware that requires a valid key, whatever its scopes; the routes check those.

    FastAPI reads and parses a body before it resolves a route's dependencies, which would be too late.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            try:
                authenticate(Request(scope))
            except ProblemError as problem:
                # The body stays unread, so the connection cannot be reused.
                problem.headers["Connection"] = "close"
                await problem_response(problem, path=scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)
