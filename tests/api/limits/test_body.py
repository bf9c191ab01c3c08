"""Bodies over their limit are rejected by Content-Length or while they stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi.testclient import TestClient
from httpx2 import Response

from services.api.settings import ApiSettings
from tests.api.harness import Platform

BYTES = 2000


@pytest.fixture
def client(offline: Platform) -> TestClient:
    limits = {"json_limit_bytes": BYTES, "upload_limit_bytes": 3 * BYTES}
    offline.settings = ApiSettings(**{**offline.settings.model_dump(), **limits})
    return offline.client()


def chunks(total: int) -> Iterator[bytes]:
    for _ in range(total // 100):
        yield b" " * 100


def assert_too_large(response: Response) -> None:
    assert response.status_code == 413
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["type"] == "urn:stillhouse:problem:too-large"


@pytest.mark.parametrize("path", ["/jobs", "/jobs/plan", "/predict", "/v1/classify"])
def test_a_declared_body_over_the_limit_is_rejected(client: TestClient, path: str) -> None:
    headers = {"content-type": "application/json"}
    assert_too_large(client.post(path, content=b" " * (BYTES + 1), headers=headers))


@pytest.mark.parametrize("path", ["/jobs", "/jobs/plan", "/predict", "/v1/classify"])
def test_a_streamed_body_over_the_limit_is_rejected(client: TestClient, path: str) -> None:
    headers = {"content-type": "application/json"}
    assert_too_large(client.post(path, content=chunks(BYTES + 100), headers=headers))


def test_a_body_at_the_limit_is_read(client: TestClient) -> None:
    body = b'{"inputs": "x"}'.ljust(BYTES)
    response = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 503  # accepted, but no model is promoted


def test_a_false_content_length_does_not_bypass_the_limit(client: TestClient) -> None:
    headers = {"content-type": "application/json", "content-length": "5"}
    assert_too_large(client.post("/predict", content=chunks(BYTES + 100), headers=headers))
