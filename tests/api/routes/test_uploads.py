"""Uploads over the limits wait for a validation slot or are rejected."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.api.app import create_app
from services.api.limits.uploads import UploadLimiter
from services.api.routes import datasets
from services.shared.datasets.card import DatasetCard
from services.shared.datasets.sandbox import ingest_in_sandbox
from services.shared.sandbox.sandbox import Sandbox
from tests.api.harness import Platform

FORM = {"heads": '[{"name": "mood"}]'}
ROWS = "".join(f'{{"text": "t{n}", "mood": "{n % 2}"}}\n' for n in range(40)).encode()


class GatedIngest:
    """Wraps the real ingestion: counts concurrent calls and blocks them until `open` is set."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.entered = threading.Semaphore(0)
        self.lock = threading.Lock()
        self.active = self.max_active = 0

    def __call__(self, sandbox: Sandbox, upload: Path, **fields: Any) -> DatasetCard:
        with self.lock:
            self.active += 1
            self.max_active = max(self.max_active, self.active)
        self.entered.release()
        assert self.open.wait(60)
        try:
            return ingest_in_sandbox(sandbox, upload, **fields)
        finally:
            with self.lock:
                self.active -= 1


@pytest.fixture
def gated_ingest(monkeypatch: pytest.MonkeyPatch) -> GatedIngest:
    gated = GatedIngest()
    monkeypatch.setattr(datasets, "ingest_in_sandbox", gated)
    return gated


async def upload(client: httpx.AsyncClient) -> httpx.Response:
    return await client.post("/datasets", files={"file": ("a.jsonl", ROWS)}, data=FORM)


def async_client(platform: Platform) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(platform.context()))
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


@pytest.mark.anyio
async def test_validations_over_the_limit_wait(
    platform: Platform, gated_ingest: GatedIngest
) -> None:
    platform.upload_limiter = UploadLimiter(max_uploads=12, max_validations=2)
    async with async_client(platform) as client:
        tasks = [asyncio.create_task(upload(client)) for _ in range(6)]
        for _ in range(2):
            assert await asyncio.to_thread(gated_ingest.entered.acquire, timeout=60)
        gated_ingest.open.set()
        responses = await asyncio.gather(*tasks)
    assert [response.status_code for response in responses] == [201] * 6
    assert gated_ingest.max_active == 2


@pytest.mark.anyio
async def test_an_upload_over_the_limit_is_rejected_with_retry_after(
    platform: Platform, gated_ingest: GatedIngest
) -> None:
    platform.upload_limiter = UploadLimiter(max_uploads=1, max_validations=1)
    async with async_client(platform) as client:
        first_upload = asyncio.create_task(upload(client))
        assert await asyncio.to_thread(gated_ingest.entered.acquire, timeout=60)
        second = await upload(client)
        gated_ingest.open.set()
        first, third = await first_upload, await upload(client)
    assert (first.status_code, second.status_code, third.status_code) == (201, 429, 201)
    assert second.headers["retry-after"] == "5"
    assert second.json()["type"] == "urn:stillhouse:problem:overloaded"


@pytest.mark.anyio
async def test_failed_uploads_release_their_slot(platform: Platform) -> None:
    platform.upload_limiter = UploadLimiter(max_uploads=1, max_validations=1)
    broken: list[dict[str, Any]] = [
        {"files": {"file": ("a.jsonl", b"{")}, "data": FORM},
        {"files": {"file": ("a.jsonl", ROWS)}, "data": {"heads": "["}},
        {"content": b"--b\r\nbroken", "headers": {"content-type": "multipart/form-data"}},
        {"json": {}},
    ]
    async with async_client(platform) as client:
        found = [(await client.post("/datasets", **body)).status_code for body in broken]
        found.append((await upload(client)).status_code)
    assert found == [422, 422, 400, 422, 201]
