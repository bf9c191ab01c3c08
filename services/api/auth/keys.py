"""API keys: names, scopes and hashes; the keys themselves are never stored."""

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


class Scope(str, Enum):
    """What a key may do; `admin` may do everything, and any key may read."""

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

    def allows(self, scope: Scope | None) -> bool:
        """Return whether the key may do what needs `scope` (None: any key)."""
        return scope is None or scope in self.scopes or Scope.ADMIN in self.scopes


KeysFile: TypeAdapter[dict[str, ApiKey]] = TypeAdapter(dict[str, ApiKey])


class Keys:
    """The known keys; with none of them the door is open."""

    def __init__(self, entries: dict[str, ApiKey]) -> None:
        self._entries = entries

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def find(self, key: str) -> ApiKey | None:
        """Return the entry of `key`, in a time that does not depend on which entry it is."""
        # A random 256-bit key needs no slow hash: there is nothing to guess from a dictionary.
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        found = None
        for entry in self._entries.values():
            if hmac.compare_digest(entry.sha256, digest):
                found = entry
        return found


def read_keys(path: Path) -> Keys:
    """Read a keys file. Raises ValueError where it is not one."""
    try:
        return Keys(KeysFile.validate_json(path.read_bytes()))
    except OSError as error:
        raise ValueError(f"The API keys file {path} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(
            f"The API keys file {path} is wrong at {where!r}: {first['msg']}."
        ) from error


def load_keys(settings: ApiSettings) -> Keys:
    """Return the keys the API starts with. Raises ValueError for an open door on a network."""
    keys = read_keys(settings.api_keys_file) if settings.api_keys_file else Keys({})
    if keys.is_empty and not is_loopback(settings.host):
        raise ValueError(
            f"Refusing to listen on {settings.host} without API keys: anybody who reaches it could "
            "submit jobs. Set STILLHOUSE_API_KEYS_FILE, or listen on 127.0.0.1."
        )
    return keys


_bearer = HTTPBearer(auto_error=False, description="An API key; not needed on loopback.")


def requires(scope: Scope | None) -> Callable[..., Awaitable[None]]:
    """Return a dependency that lets a request pass with a key that has `scope` (None: any key)."""

    async def check(
        request: Request,
        credentials: Annotated[  # noqa: ARG001 - for the OpenAPI document
            HTTPAuthorizationCredentials | None, Depends(_bearer)
        ],
    ) -> None:
        authorize(request, scope)

    return check


def authorize(request: Request, scope: Scope | None) -> None:
    """Let a request pass with a key that has `scope` (None: any key), at its rate. Raises ProblemError."""
    key = authenticate(request)
    if key is None:
        return
    rates: RateLimiters = request.app.state.context.rate_limiters
    (rates.predict if scope is Scope.PREDICT else rates.other).acquire(key.sha256)
    if not key.allows(scope):
        raise ProblemError("forbidden", f"This needs a key with the scope {scope}.")


def authenticate(request: Request) -> ApiKey | None:
    """Return the key that a request bears, or None where there are no keys and it is local.

    Raises ProblemError. A right key passes from an address that has sent too many wrong ones: behind
    a proxy all clients have one address, and nobody guesses 256 random bits at any rate.
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
            "Send an API key of this server as `Authorization: Bearer <key>`.",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return key


async def limit_by_address(request: Request) -> None:
    """Dependency of routes that need no key but cost something: a rate for each address."""
    context = request.app.state.context
    if not context.keys.is_empty:
        context.rate_limiters.other.acquire(client_address(request))


def _check_local(request: Request) -> None:
    """Refuse what a foreign web page makes a browser on this machine ask.

    Without keys nothing else tells such a request from its user's: a page may post forms to
    127.0.0.1, or let its own name point there.
    """
    origin = request.headers.get("origin")
    asked = [f"//{request.headers.get('host', '')}", *([origin] if origin else [])]
    if not all(map(_is_local, asked)):
        raise ProblemError(
            "forbidden",
            "This server has no API keys, so it answers only requests to and from localhost.",
        )


@lru_cache(maxsize=64)
def _is_local(url: str) -> bool:
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False
