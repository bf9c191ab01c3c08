"""Who sends a request: its key, what that permits, and the project that it sees."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from services.api.auth.keys import ApiKey, Keys, Scope
from services.api.auth.sessions import COOKIE, CSRF_HEADER, Session, Sessions
from services.api.limits.rate_limit import RateLimiters, client_address
from services.api.problems import ProblemError
from services.api.settings import is_loopback
from services.shared.jobs.projects import DEFAULT_PROJECT, Access
from services.shared.jobs.quota import UNLIMITED, Quota

LOCAL = "local"  # who does what without a key, on a server that needs none
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_CALLER = "stillhouse.caller"  # in the ASGI scope: a request is authenticated once


@dataclass(frozen=True)
class Caller:
    """The sender of an authenticated request; without a `key` the server has none, and the sender is local."""

    address: str
    name: str = LOCAL  # of the key, for the records of who did what
    key: ApiKey | None = None
    default_quota: Quota = UNLIMITED
    session: Session | None = None  # of the console, instead of the key itself

    @property
    def id(self) -> str:
        """What its requests are counted by."""
        return self.address if self.key is None else self.key.sha256

    @property
    def project(self) -> str:
        """Where what it creates belongs, and where its aliases are."""
        return DEFAULT_PROJECT if self.key is None else self.key.owner

    @property
    def access(self) -> Access:
        """What it sees and creates in the store."""
        quota = self.default_quota if self.key is None else self.key.quota or self.default_quota
        sees_all = self.allows(Scope.ADMIN)
        return Access(project=self.project, sees_all=sees_all, actor=self.name, quota=quota)

    def allows(self, scope: Scope) -> bool:
        """Return whether the caller may do what needs `scope`."""
        return self.key is None or self.key.allows(scope)


_bearer = HTTPBearer(
    auto_error=False, description="An API key; not required on a loopback server without keys."
)


def requires(scope: Scope) -> Callable[..., Awaitable[None]]:
    """Return a dependency that requires a key with `scope`."""

    async def check(
        request: Request,
        credentials: Annotated[  # noqa: ARG001 - for the OpenAPI document
            HTTPAuthorizationCredentials | None, Depends(_bearer)
        ],
    ) -> None:
        authorize(request, scope)

    check.scope = scope  # type: ignore[attr-defined]  # what the tests of all routes read
    return check


def authorize(request: Request, scope: Scope) -> Caller:
    """Require a key with `scope` and apply its rate limit; return the caller. Raises ProblemError."""
    caller = authenticate(request)
    if caller.key is None:
        return caller
    rates: RateLimiters = request.app.state.context.rate_limiters
    (rates.predict if scope is Scope.PREDICT else rates.other).acquire(caller.id)
    if not caller.allows(scope):
        raise ProblemError("forbidden", f"This request needs a key with the scope {scope}.")
    return caller


async def limit_by_key(request: Request) -> None:
    """Rate-limit a route that needs a key, whatever its scopes (a dependency)."""
    caller = authenticate(request)
    if caller.key is not None:
        request.app.state.context.rate_limiters.other.acquire(caller.id)


def require_scope(request: Request, scope: Scope, *, effect: str) -> None:
    """Require a further scope for an effect of a request that its route alone does not show.

    Raises ProblemError.
    """
    if not authenticate(request).allows(scope):
        raise ProblemError("forbidden", f"{effect} needs a key with the scope {scope}.")


def authenticate(request: Request) -> Caller:
    """Return the sender of a request, who has a key, or is local if no keys are configured.

    Raises ProblemError. A valid key is accepted even from an address that has sent too many invalid
    ones: behind a proxy all clients share one address, and 256 random bits cannot be guessed.
    """
    known = request.scope.get(_CALLER)
    if isinstance(known, Caller):
        return known
    caller = _authenticate(request)
    request.scope[_CALLER] = caller
    return caller


def identify(request: Request) -> Caller | None:
    """Return the sender of a request to a route that needs no key, or None without a valid one."""
    keys: Keys = request.app.state.context.keys
    address = client_address(request)
    if keys.is_empty:
        return Caller(address)
    found = _find_key(request, keys)
    if found is None and (session := _find_session(request, keys)):
        found = session[:2]
    return None if found is None else Caller(address, *found)


def _find_session(request: Request, keys: Keys) -> tuple[str, ApiKey, Session] | tuple[()]:
    """Return the key's name, its entry and the session of a request's cookie, or nothing."""
    cookie = request.cookies.get(COOKIE)
    if cookie is None or "authorization" in request.headers:  # a key that is sent is what counts
        return ()
    sessions: Sessions = request.app.state.context.sessions
    return sessions.find(cookie, keys) or ()


def _check_csrf(request: Request, session: Session) -> None:
    """Require a writing request of a session to come from a page of this origin. Raises ProblemError."""
    if request.method in _READING:
        return
    origin = request.headers.get("origin")
    foreign = origin is not None and origin.partition("://")[2] != request.headers.get("host", "")
    sent = request.headers.get(CSRF_HEADER, "").encode("utf-8", "replace")
    if foreign or not hmac.compare_digest(sent, session.csrf_token.encode()):
        raise ProblemError(
            "forbidden",
            "A request of a signed-in browser that is no GET needs `X-CSRF-Token` from GET /session, and the "
            "origin of this server.",
        )


def _find_key(request: Request, keys: Keys) -> tuple[str, ApiKey] | None:
    kind, _, credentials = request.headers.get("authorization", "").partition(" ")
    return keys.find(credentials.strip()) if kind.lower() == "bearer" else None


def _authenticate(request: Request) -> Caller:
    context = request.app.state.context
    keys: Keys = context.keys
    quota: Quota = context.settings.quota
    address = client_address(request)
    if keys.is_empty:
        _check_local(request)
        return Caller(address, default_quota=quota)
    if session := _find_session(request, keys):
        _check_csrf(request, session[2])
        return Caller(address, *session[:2], default_quota=quota, session=session[2])
    found = _find_key(request, keys)
    if found is None:
        rates: RateLimiters = request.app.state.context.rate_limiters
        rates.wrong_keys.acquire(address)
        raise ProblemError(
            "unauthorized",
            "Send a valid API key as `Authorization: Bearer <key>`.",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return Caller(address, *found, default_quota=quota)


async def limit_by_address(request: Request) -> None:
    """Rate-limit a route that needs no key by client address (a dependency)."""
    context = request.app.state.context
    if not context.keys.is_empty:
        context.rate_limiters.other.acquire(client_address(request))


def _check_local(request: Request) -> None:
    """Reject requests that a foreign web page makes a browser on this machine send.

    A page may post forms to 127.0.0.1 (cross-site request forgery) or resolve its own name to it (DNS
    rebinding); without keys, only Host and Origin tell such a request from the user's own.
    """
    origin = request.headers.get("origin")
    urls = [f"//{request.headers.get('host', '')}", *([origin] if origin else [])]
    if not all(map(_is_local, urls)):
        raise ProblemError(
            "forbidden",
            "This server has no API keys, so it accepts only requests to and from localhost.",
        )


@lru_cache(maxsize=64)
def _is_local(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False
