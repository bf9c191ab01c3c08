"""How many uploads are taken at once, and how many of them are read row by row."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.api.problems import RETRY_AFTER_SECONDS, ProblemError


class UploadLimiter:
    """Lets `max_uploads` uploads in, and `max_validations` of them be validated; the others wait."""

    def __init__(self, *, max_uploads: int = 8, max_validations: int = 2) -> None:
        self._most_open = max_uploads
        self._open = 0
        self._validations = asyncio.Semaphore(max_validations)

    @asynccontextmanager
    async def upload(self) -> AsyncIterator[None]:
        """Hold a place from before the body is read. Raises ProblemError where all are taken."""
        if self._open >= self._most_open:
            raise ProblemError(
                "overloaded",
                f"{self._open} datasets are being uploaded; this server takes no more at once.",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS), "Connection": "close"},
            )
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    @asynccontextmanager
    async def validation(self) -> AsyncIterator[None]:
        """Wait for a turn: a validation takes a core, a thread, and memory for all its texts."""
        async with self._validations:
            yield
