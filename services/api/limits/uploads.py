"""Limits on concurrent uploads and concurrent validations."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.api.problems import RETRY_AFTER_SECONDS, ProblemError


class UploadLimiter:
    """Accepts `max_uploads` concurrent uploads and validates `max_validations` of them; the others wait.

    One caller holds at most half of the slots, so that its slow uploads do not lock out all others.
    """

    def __init__(self, *, max_uploads: int = 8, max_validations: int = 2) -> None:
        self._max_uploads = max_uploads
        self._max_of_one_caller = max(1, max_uploads // 2)
        self._active: Counter[str] = Counter()  # by caller
        self._validations = asyncio.Semaphore(max_validations)

    @asynccontextmanager
    async def upload(self, caller: str = "") -> AsyncIterator[None]:
        """Hold an upload slot while the body is read. Raises ProblemError if none is free."""
        if self._active.total() >= self._max_uploads:
            raise _overloaded(f"{self._active.total()} uploads are in progress")
        if self._active[caller] >= self._max_of_one_caller:
            raise _overloaded(f"{self._active[caller]} uploads of this key are in progress")
        self._active[caller] += 1
        try:
            yield
        finally:
            self._active[caller] -= 1
            if not self._active[caller]:
                del self._active[caller]

    @asynccontextmanager
    async def validation(self) -> AsyncIterator[None]:
        """Wait for a validation slot: each occupies a core, a thread, and memory for all its texts."""
        async with self._validations:
            yield


def _overloaded(what: str) -> ProblemError:
    return ProblemError(
        "overloaded",
        f"{what}; this server accepts no more at once.",
        headers={"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"},
    )
