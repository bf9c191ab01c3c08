"""The sandboxes of a test process, which start once with the first test that needs them."""

from __future__ import annotations

import atexit
from functools import lru_cache

from services.api.sandboxes import Sandboxes, create_sandboxes
from services.api.settings import ApiSettings
from services.shared.sandbox.limits import Limits
from services.shared.sandbox.sandbox import Sandbox

MIB = 2**20


@lru_cache(maxsize=1)
def sandboxes() -> Sandboxes:
    """Return sandboxes with the limits of the settings' defaults."""
    found = create_sandboxes(ApiSettings.model_construct())
    atexit.register(found.close)
    return found


def validations(*, memory_bytes: int = 1024 * MIB, seconds: float = 60.0) -> Sandbox:
    """Return a sandbox for uploads with other limits, in the same processes."""
    limits = Limits(
        seconds=seconds, wall_seconds=60 * seconds, memory_bytes=memory_bytes, file_bytes=2**32
    )
    return Sandbox(sandboxes().validations.server, limits=limits)
