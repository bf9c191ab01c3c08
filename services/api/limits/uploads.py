"""Limits on concurrent uploads and concurrent validations."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.api.problems import RETRY_AFTER_SECONDS, ProblemError


class UploadLimiter:
    """Accepts `max_uploads` concurrent uploads and validates `max_validations` of them; the others wait."""

    def __init__(self, *, max_uploads: int = 8, max_validations: int = 2) -> None:
        self._max_uploads = max_uploads
        self._active = 0
        self._validations = asyncio.Semaphore(max_validations)

    @asynccontextmanager
    async def upload(self) -> AsyncIterator[None]:
        """Hold an upload slot while the body is read. Raises ProblemError if none is free."""
        if self._active >= self._max_uploads:
            raise ProblemError(
                "overloaded",
                f"{self._active} uploads are in progress; this server accepts no more at once.",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"},
            )
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    @asynccontextmanager
    async def validation(self) -> AsyncIterator[None]:
        """Wait for a validation slot: each occupies a core, a thread, and memory for all its texts."""
        async with self._validations:
            yield
