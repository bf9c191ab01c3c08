"""One caller cannot hold every upload slot."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from services.api.limits.uploads import UploadLimiter
from services.api.problems import ProblemError


@pytest.mark.anyio
async def test_stalled_uploads_of_one_key_leave_slots_for_others() -> None:
    limiter = UploadLimiter(max_uploads=8)
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(limiter.upload("stalling"))
        with pytest.raises(ProblemError, match="4 uploads of this key"):
            await stack.enter_async_context(limiter.upload("stalling"))
        await stack.enter_async_context(limiter.upload("other"))
    async with limiter.upload("stalling"):
        pass
