"""Looks at a request's key before anything reads its body: strangers make nobody parse a megabyte."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from services.api.auth.keys import authenticate
from services.api.problems import ProblemError, problem_response

# Probes, and what only describes the API. Everything else, what does not exist too, needs a key.
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
    """ASGI middleware that lets in who has a key, whatever its scopes; the routes look at those.

    FastAPI reads and parses a body before it asks a route's dependencies.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in PUBLIC_PATHS:
            try:
                authenticate(Request(scope))
            except ProblemError as problem:
                # The body stays unread, so the connection cannot be used again.
                problem.headers["Connection"] = "close"
                await problem_response(problem, path=scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)
