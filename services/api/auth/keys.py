"""API keys: names, projects, scopes and hashes. The keys themselves are never stored."""

from __future__ import annotations

import hashlib
import hmac
from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter, ValidationError

from services.api.settings import ApiSettings, is_loopback
from services.shared.jobs.projects import DEFAULT_PROJECT, PROJECT_PATTERN
from services.shared.jobs.quota import Quota


class Scope(str, Enum):
    """What a key permits within its project; `admin` permits everything in every project."""

    PREDICT = "predict"
    READ = "read"
    SUBMIT = "submit"
    PROMOTE = "promote"
    METRICS = "metrics"
    ADMIN = "admin"

    __str__ = str.__str__


# Who submits jobs or promotes models has to see them. `predict` implies nothing.
_IMPLY_READ = frozenset({Scope.READ, Scope.SUBMIT, Scope.PROMOTE})

KeyName = Annotated[
    str, StringConstraints(min_length=1, max_length=120, pattern=r"^[^\x00-\x1f\x7f]+$")
]


class ApiKey(BaseModel):
    """One entry of the keys file.

    An entry without `project` was made before there were projects: it belongs to `default`, and may
    scrape /metrics if it may read.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    scopes: frozenset[Scope]
    project: Annotated[str, Field(pattern=PROJECT_PATTERN)] | None = None
    quota: Quota | None = None  # instead of STILLHOUSE_QUOTA

    @property
    def owner(self) -> str:
        """The project that the key belongs to."""
        return self.project or DEFAULT_PROJECT

    def allows(self, scope: Scope) -> bool:
        """Return whether the key has `scope`, or one that implies it."""
        if scope in self.scopes or Scope.ADMIN in self.scopes:
            return True
        if scope is Scope.READ:
            return bool(self.scopes & _IMPLY_READ)
        return scope is Scope.METRICS and self.project is None and self.allows(Scope.READ)


KeysFile: TypeAdapter[dict[KeyName, ApiKey]] = TypeAdapter(dict[KeyName, ApiKey])


class Keys:
    """The configured keys by name; without any, requests need no key but must be local."""

    def __init__(self, entries: dict[str, ApiKey]) -> None:
        self._entries = entries
        self.warning: str | None = None  # why they are not those of the file

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._entries)

    def replace(self, other: Keys) -> None:
        """Take over the entries of `other`; requests in progress finish with those they began with."""
        self._entries = other._entries

    @property
    def is_empty(self) -> bool:
        return not self._entries

    def find(self, key: str) -> tuple[str, ApiKey] | None:
        """Return the name and entry of `key` in constant time."""
        # A random 256-bit key needs no slow hash: dictionary attacks do not apply.
        digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()
        found = None
        for name, entry in self._entries.items():
            if hmac.compare_digest(entry.sha256, digest):
                found = name, entry
        return found

    def by_hash(self, digits: str) -> tuple[str, ApiKey] | None:
        """Return the name and entry of the key whose hash begins with `digits`, or None."""
        return next(
            (
                (name, entry)
                for name, entry in self._entries.items()
                if digits and entry.sha256.startswith(digits)
            ),
            None,
        )


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
