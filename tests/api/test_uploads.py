"""Uploads beyond those that the server takes at once wait for their turn, or are refused."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from services.api.app import create_app
from services.api.limits.uploads import UploadLimiter
from services.api.routes import datasets

FORM = {"heads": '[{"name": "mood"}]'}
ROWS = "".join(f'{{"text": "t{n}", "mood": "{n % 2}"}}\n' for n in range(40)).encode()


class GatedIngest:
    """Stands before the real validation: counts who is in, and lets nobody out before `open`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.lock = threading.Lock()
        self.inside = self.most = 0
        self.ingest = datasets.ingest
        monkeypatch.setattr(datasets, "ingest", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        self.entered.release()
        assert self.open.wait(60)
        try:
            return self.ingest(*args, **kwargs)
        finally:
            with self.lock:
                self.inside -= 1


@pytest.fixture
def gated_ingest(monkeypatch: pytest.MonkeyPatch) -> GatedIngest:
    return GatedIngest(monkeypatch)


async def upload(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/datasets", files={"file": ("a.jsonl", ROWS)}, data=FORM)


def client_of(platform: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(platform.context()))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


def test_validations_over_the_limit_wait(platform: Any, gated_ingest: GatedIngest) -> None:
    platform.upload_limiter = UploadLimiter(max_uploads=6, max_validations=2)

    async def six() -> list[httpx.Response]:
        async with client_of(platform) as client:
            tasks = [asyncio.create_task(upload(client)) for _ in range(6)]
            for _ in range(2):
                assert await asyncio.to_thread(gated_ingest.entered.acquire, timeout=60)
            gated_ingest.open.set()
            return await asyncio.gather(*tasks)

    assert [response.status_code for response in asyncio.run(six())] == [201] * 6
    assert gated_ingest.most == 2


def test_an_upload_over_the_limit_is_rejected_with_retry_after(
    platform: Any, gated_ingest: GatedIngest
) -> None:
    platform.upload_limiter = UploadLimiter(max_uploads=1, max_validations=1)

    async def three() -> list[httpx.Response]:
        async with client_of(platform) as client:
            first = asyncio.create_task(upload(client))
            assert await asyncio.to_thread(gated_ingest.entered.acquire, timeout=60)
            second = await upload(client)
            gated_ingest.open.set()
            return [await first, second, await upload(client)]

    first, second, third = asyncio.run(three())
    assert (first.status_code, second.status_code, third.status_code) == (201, 429, 201)
    assert second.headers["retry-after"] == "5"
    assert second.json()["type"] == "urn:stillhouse:problem:overloaded"


def test_failed_uploads_release_their_slot(platform: Any) -> None:
    platform.upload_limiter = UploadLimiter(max_uploads=1, max_validations=1)

    async def several() -> list[int]:
        async with client_of(platform) as client:
            broken = [
                {"files": {"file": ("a.jsonl", b"{")}, "data": FORM},
                {"files": {"file": ("a.jsonl", ROWS)}, "data": {"heads": "["}},
                {"content": b"--b\r\nbroken", "headers": {"content-type": "multipart/form-data"}},
                {"json": {}},
            ]
            found = [(await client.post("/datasets", **body)).status_code for body in broken]
            return [*found, (await upload(client)).status_code]

    assert asyncio.run(several()) == [422, 422, 400, 422, 201]
