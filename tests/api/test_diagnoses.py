"""POST /diagnoses reads any log, and refuses only what is no case."""

from __future__ import annotations

from typing import Any

import pytest

from services.api.settings import ApiSettings

LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total "
    "capacity of 63.98 GiB of which 112.00 MiB is free. Of the allocated memory 62.00 GiB is "
    "allocated by PyTorch, and 500.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.fixture
def client(offline: Any) -> Any:
    return offline.client()


def test_a_log_is_read_without_any_database(client: Any) -> None:
    body = client.post("/diagnoses", json={"log": LOG, "model_name": "Qwen3-32B"}).json()
    assert body["message"]["requested_bytes"] == 250 * 2**20
    assert {"cause", "confidence", "sharded", "hypotheses", "remedies"} <= body.keys()


def test_nothing_known_is_undecided(client: Any) -> None:
    body = client.post("/diagnoses", json={}).json()
    assert (body["cause"], body["confidence"]) == ("undecided", "undecided")


def test_a_value_that_cannot_be_is_named(client: Any) -> None:
    response = client.post("/diagnoses", json={"ranks": -3})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "ranks"


@pytest.mark.parametrize("body", [[], "log", 3, None])
def test_what_is_no_object_is_refused(client: Any, body: Any) -> None:
    assert client.post("/diagnoses", json=body).status_code == 422


def test_a_log_may_be_longer_than_other_bodies(offline: Any) -> None:
    small = {"json_limit_bytes": 1000}
    offline.settings = ApiSettings(**{**offline.settings.model_dump(), **small})
    response = offline.client().post("/diagnoses", json={"log": LOG + " " * 2000})
    assert response.status_code == 200
