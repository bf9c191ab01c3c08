"""Sessions of the console: a key is exchanged once for a cookie that a page cannot read.

The cookie is signed, not stored, so that every process of the API accepts it, and the console can say that
the database is away. It names the hash of its key: a key that is revoked ends its sessions.

    <nonce>.<first 16 of the key's hash>.<began>.<expires>.<HMAC-SHA256 over these and the whole hash>

A browser sends the cookie with every request, even those that another page makes it send (SameSite
forbids that, where the browser is new enough). So a writing request also needs the session's CSRF token,
which only a page of the same origin can read from `GET /session`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.api.auth.keys import ApiKey, Keys
from services.shared.files.atomic_write import partial_path, sync

COOKIE = "stillhouse_session"
CSRF_HEADER = "x-csrf-token"
SECRET_FILE = ".console_secret"  # in the data directory, which all processes of the API share
_KEY_DIGITS = 16
_MAX_COOKIE = 300  # characters
_MAX_ENDED = 10_000  # sessions that were ended before they expired


@dataclass(frozen=True)
class Session:
    """A signed-in browser; times are seconds since the epoch."""

    nonce: str
    began: int
    expires: int
    csrf_token: str


class Sessions:
    """Starts, finds and ends sessions; a session that is ended here is accepted by no request to this process."""

    def __init__(
        self,
        secret_file: Path,
        *,
        idle_seconds: float,
        most_seconds: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._secret_file = secret_file
        self._idle_seconds = idle_seconds
        self._most_seconds = most_seconds
        self._clock = clock
        self._secret_bytes: bytes | None = None
        self._ended: dict[str, int] = {}  # by nonce: when it would have expired

    def start(self, key: ApiKey) -> tuple[str, Session]:
        """Return the cookie of a new session of `key`, and the session. Raises OSError for its secret."""
        now = int(self._clock())
        return self._issue(key, secrets.token_hex(16), began=now)

    def renew(self, key: ApiKey, session: Session) -> tuple[str, Session] | None:
        """Return the session with a later end, or None where a third of its time is not over yet."""
        now = self._clock()
        if now < session.expires - self._idle_seconds * 2 / 3:
            return None
        return self._issue(key, session.nonce, began=session.began)

    def end(self, session: Session) -> None:
        """Accept the session no more."""
        now = self._clock()
        self._ended = {nonce: expires for nonce, expires in self._ended.items() if expires > now}
        while len(self._ended) >= _MAX_ENDED:
            self._ended.pop(next(iter(self._ended)))
        self._ended[session.nonce] = int(now + self._most_seconds) + 1

    def find(self, cookie: str, keys: Keys) -> tuple[str, ApiKey, Session] | None:
        """Return the key's name, its entry and the session of a valid cookie, or None."""
        parts = cookie.split(".") if len(cookie) <= _MAX_COOKIE else []
        if len(parts) != 5 or not (parts[2].isdecimal() and parts[3].isdecimal()):
            return None
        nonce, key_digits, began, expires, signature = parts
        found = keys.by_hash(key_digits)
        if found is None or len(key_digits) != _KEY_DIGITS:
            return None
        name, key = found
        try:
            expected = self._sign(key, nonce, int(began), int(expires))
        except OSError:  # without its secret no session can be valid
            return None
        signed = hmac.compare_digest(expected.encode(), signature.encode("utf-8", "replace"))
        if not signed or self._clock() >= int(expires):
            return None
        if nonce in self._ended:
            return None
        return name, key, Session(nonce, int(began), int(expires), self._csrf_token(nonce))

    def _issue(self, key: ApiKey, nonce: str, *, began: int) -> tuple[str, Session]:
        expires = int(min(self._clock() + self._idle_seconds, began + self._most_seconds))
        signature = self._sign(key, nonce, began, expires)
        cookie = f"{nonce}.{key.sha256[:_KEY_DIGITS]}.{began}.{expires}.{signature}"
        return cookie, Session(nonce, began, expires, self._csrf_token(nonce))

    def _sign(self, key: ApiKey, nonce: str, began: int, expires: int) -> str:
        text = f"session {nonce} {key.sha256} {began} {expires}"
        return hmac.new(self._secret(), text.encode(), hashlib.sha256).hexdigest()

    def _csrf_token(self, nonce: str) -> str:
        return hmac.new(self._secret(), f"csrf {nonce}".encode(), hashlib.sha256).hexdigest()

    def _secret(self) -> bytes:
        if self._secret_bytes is None:
            self._secret_bytes = _read_or_create(self._secret_file)
        return self._secret_bytes


def _read_or_create(path: Path) -> bytes:
    """Return the secret; of several processes that make one, the first wins."""
    if not path.exists():
        own = partial_path(path)
        own.touch(mode=0o600)
        try:
            own.write_text(secrets.token_hex(32))
            sync(own)
            with suppress(FileExistsError):
                os.link(own, path)
        finally:
            own.unlink(missing_ok=True)
    return bytes.fromhex(path.read_text())
