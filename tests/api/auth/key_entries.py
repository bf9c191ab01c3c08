"""Keys of a test: the key of the name `ci` is `key-of-ci`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from services.api.auth.keys import ApiKey, Keys, Scope


def keys_of(**entries: tuple[str, Sequence[Scope]]) -> Keys:
    """Return keys by name, each with its project and scopes."""
    return Keys(
        {
            name: ApiKey(
                sha256=hashlib.sha256(key_of(name).encode()).hexdigest(),
                scopes=frozenset(scopes),
                project=project,
            )
            for name, (project, scopes) in entries.items()
        }
    )


def key_of(name: str) -> str:
    """Return the key of this name."""
    return f"key-of-{name}"


def bearer(name: str) -> dict[str, str]:
    """Return the headers of a request with the key of this name."""
    return {"Authorization": f"Bearer {key_of(name)}", "Accept": "application/json"}
