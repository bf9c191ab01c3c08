"""A request that promotes a model needs the promote scope, whichever route it takes."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
from fastapi.testclient import TestClient

from services.api.auth.keys import Keys, KeysFile
from tests.api.harness import JobDriver, Platform

SUBMIT = {"Authorization": "Bearer submit-key"}
BOTH = {"Authorization": "Bearer both-key"}


def _entry(key: str, *scopes: str) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(key.encode()).hexdigest(), "scopes": list(scopes)}


@pytest.fixture
def client(platform: Platform) -> TestClient:
    entries = {
        "submitter": _entry("submit-key", "submit"),
        "owner": _entry("both-key", "submit", "promote"),
    }
    platform.keys = Keys(KeysFile.validate_python(entries))
    return platform.client()


def test_a_submit_key_cannot_promote_by_a_job(desk: JobDriver, client: TestClient) -> None:
    student = {"config": {"model_type": "qwen3"}, "tokenizer": "teacher"}
    distill = {"student": student, "promote": "when_passed", "gate": {"min_macro_f1_share": 0}}
    teacher = {key: value for key, value in desk.spec().items() if key != "kind"}
    chain = {"kind": "chain", "teacher": teacher, "distill": distill}
    refused = client.post("/jobs", json=chain, headers=SUBMIT)
    assert refused.status_code == 403
    assert "promote" in refused.json()["detail"]
    assert client.get("/jobs", headers=SUBMIT).json()["items"] == []
    accepted = client.post("/jobs", json=chain, headers=BOTH)
    assert accepted.status_code == 202
    child = accepted.json()["child_job_ids"][0]
    client.post(f"/jobs/{accepted.json()['id']}/cancel", headers=BOTH)
    for job_id in (accepted.json()["id"], child):  # a retry has the same effect
        assert client.post(f"/jobs/{job_id}/retry", headers=SUBMIT).status_code == 403


def test_a_submit_key_may_submit_what_promotes_nothing(desk: JobDriver, client: TestClient) -> None:
    assert client.post("/jobs", json=desk.spec(), headers=SUBMIT).status_code == 202
