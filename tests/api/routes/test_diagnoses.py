"""POST /diagnoses reads any log and refuses only what is not a case."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from fastapi.testclient import TestClient

from services.api.settings import ApiSettings
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose

if TYPE_CHECKING:
    from tests.api.harness import Platform

REPORTS = json.loads((Path(__file__).parents[2] / "data" / "oom_reports.json").read_text())

LOG = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 250.00 MiB. GPU 0 has a total "
    "capacity of 63.98 GiB of which 112.00 MiB is free. Of the allocated memory 62.00 GiB is "
    "allocated by PyTorch, and 500.00 MiB is reserved by PyTorch but unallocated."
)


@pytest.fixture
def client(offline: Platform) -> TestClient:
    return offline.client()


def test_a_log_is_read_without_any_database(client: TestClient) -> None:
    body = client.post("/diagnoses", json={"log": LOG, "model_name": "Qwen3-32B"}).json()
    assert body["message"]["requested_bytes"] == 250 * 2**20
    assert {"cause", "confidence", "sharded", "hypotheses", "remedies"} <= body.keys()


def test_nothing_known_is_undecided(client: TestClient) -> None:
    body = client.post("/diagnoses", json={}).json()
    assert (body["cause"], body["confidence"]) == ("undecided", "undecided")


def test_an_invalid_value_is_named(client: TestClient) -> None:
    response = client.post("/diagnoses", json={"ranks": -3})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "ranks"


@pytest.mark.parametrize("body", [[], "log", 3, None])
def test_a_body_that_is_not_an_object_is_refused(client: TestClient, body: object) -> None:
    assert client.post("/diagnoses", json=body).status_code == 422


def test_a_log_may_be_longer_than_other_bodies(offline: Platform) -> None:
    small = {"json_limit_bytes": 1000}
    offline.settings = ApiSettings(**{**offline.settings.model_dump(), **small})
    response = offline.client().post("/diagnoses", json={"log": LOG + " " * 2000})
    assert response.status_code == 200


def test_the_answer_is_the_diagnosis_byte_for_byte(client: TestClient) -> None:
    for report in REPORTS:
        response = client.post("/diagnoses", json=report["case"])
        expected = diagnose(Case.from_dict(report["case"])).to_dict()
        assert response.text == json.dumps(expected, ensure_ascii=False, separators=(",", ":"))


def test_openapi_describes_the_fields_of_a_diagnosis(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    content = document["paths"]["/diagnoses"]["post"]["responses"]["200"]["content"]
    name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schemas = document["components"]["schemas"]
    assert {"cause", "confidence", "sharded", "message", "request"} <= schemas[name][
        "properties"
    ].keys()
    assert {"predicted_request_bytes", "for", "against"} <= schemas["Hypothesis"][
        "properties"
    ].keys()
    assert "not_sharded" in schemas["Cause"]["enum"]
