"""API keys: names, scopes and hashes. The keys themselves are never stored."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from services.api.limits.rate_limit import RateLimiters, client_address
from services.api.problems import ProblemError
from services.api.settings import ApiSettings, is_loopback

LOCAL = "local"  # who does what without a key, on a server that needs none


class Scope(str, Enum):
    """What a key permits; `admin` permits everything, and any key may read."""

    PREDICT = "predict"
    SUBMIT = "submit"
    PROMOTE = "promote"
    ADMIN = "admin"

    __str__ = str.__str__


class ApiKey(BaseModel):
    """One entry of the keys file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: frozenset[Scope]
    name: str = Field("", exclude=True)  # under which the file lists it

    def allows(self, scope: Scope | None) -> bool:
        """Return whether the key has `scope` (None: any key will do)."""
        return scope is None or scope in self.scopes or Scope.ADMIN in self.scopes


KeysFile: TypeAdapter[dict[str, ApiKey]] = TypeAdapter(dict[str, ApiKey])


class Keys:
    """The configured keys; without any, requests need no key but must be local."""

    def __init__(self, entries: dict[str, ApiKey]) -> None:
        self._entries = {
            name: entry.model_copy(update={"name": name}) for name, entry in entries.items()
        }

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def find(self, key: str) -> ApiKey | None:
        """Return the entry of `key` in constant time."""
        # A random 256-bit key needs no slow hash: dictionary attacks do not apply.
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        found = None
        for entry in self._entries.values():
            if hmac.compare_digest(entry.sha256, digest):
                found = entry
        return found


def read_keys(path: Path) -> Keys:
    """Read a keys file. Raises ValueError if it cannot be read or is malformed."""
    try:
        return Keys(KeysFile.validate_json(path.read_bytes()))
    except OSError as error:
        raise ValueError(f"The API keys file {path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"The API keys file {path} is invalid at {where!r}: {first['msg']}."
        ) from error


def load_keys(settings: ApiSettings) -> Keys:
    """Return the keys that the settings name. Raises ValueError for no keys on a non-loopback address."""
    keys = read_keys(settings.api_keys_file) if settings.api_keys_file else Keys({})
    if keys.is_empty and not is_loopback(settings.host):
        raise ValueError(
            f"Refusing to listen on {settings.host} without API keys: anyone who can reach it could "
            "submit jobs. Set STILLHOUSE_API_KEYS_FILE, or listen on 127.0.0.1."
        )
    return keys


_bearer = HTTPBearer(
    auto_error=False, description="An API key; not required on a loopback server without keys."
)


def requires(scope: Scope | None) -> Callable[..., Awaitable[None]]:
    """Return a dependency that requires a key with `scope` (None: any key)."""

    async def check(
        request: Request,
        credentials: Annotated[  # noqa: ARG001 - for the OpenAPI document
            HTTPAuthorizationCredentials | None, Depends(_bearer)
        ],
    ) -> None:
        authorize(request, scope)

    return check


def authorize(request: Request, scope: Scope | None) -> None:
    """Require a key with `scope` (None: any key) and apply its rate limit. Raises ProblemError."""
    key = authenticate(request)
    if key is None:
        return
    rates: RateLimiters = request.app.state.context.rate_limiters
    (rates.predict if scope is Scope.PREDICT else rates.other).acquire(key.sha256)
    if not key.allows(scope):
        raise ProblemError("forbidden", f"This request needs a key with the scope {scope}.")


def require_scope(request: Request, scope: Scope, *, effect: str) -> None:
    """Require a further scope for an effect of a request that its route alone does not show.

    Raises ProblemError.
    """
    key = authenticate(request)
    if key is not None and not key.allows(scope):
        raise ProblemError("forbidden", f"{effect} needs a key with the scope {scope}.")


def authenticate(request: Request) -> ApiKey | None:
    """Return the key of a request, or None if no keys are configured and the request is local.

    Raises ProblemError. A valid key is accepted even from an address that has sent too many invalid
    ones: behind a proxy all clients share one address, and 256 random bits cannot be guessed.
    """
    keys: Keys = request.app.state.context.keys
    if keys.is_empty:
        _check_local(request)
        return None
    kind, _, credentials = request.headers.get("authorization", "").partition(" ")
    key = keys.find(credentials.strip()) if kind.lower() == "bearer" else None
    if key is None:
        rates: RateLimiters = request.app.state.context.rate_limiters
        rates.wrong_keys.acquire(client_address(request))
        raise ProblemError(
            "unauthorized",
            "Send a valid API key as `Authorization: Bearer <key>`.",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return key


def caller_of(request: Request) -> str:
    """Return what identifies the caller of an authenticated request: its key, or its address."""
    key = authenticate(request)
    return client_address(request) if key is None else key.sha256


def creator_name(request: Request) -> str:
    """Return the name of the request's key, for the records of who did what."""
    key = authenticate(request)
    return LOCAL if key is None else key.name


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
