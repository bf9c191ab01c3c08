"""Every error response is a problem document."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx2 import Response

from services.api.admission import Admission
from services.api.errors import to_problem
from services.api.problems import PROBLEM_TYPES
from services.shared.jobs import errors as shared
from tests.api.harness import Platform
from tests.factories import plan_document
from tests.sandboxes import sandboxes

TEACHER = {"kind": "teacher", "dataset_id": "ds_1", "model": {"path": "base"}}


def assert_problem(response: Response, slug: str) -> dict[str, Any]:
    """Check the shape that every problem has, and return it."""
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    status, title = PROBLEM_TYPES[slug]
    assert body["type"] == f"urn:stillhouse:problem:{slug}"
    assert (body["title"], body["status"]) == (title, status)
    assert response.status_code == status
    assert body["detail"]
    assert body["instance"].startswith("/")
    return body


def fields(body: dict[str, Any]) -> list[str]:
    return [error["field"] for error in body["errors"]]


@pytest.fixture
def client(offline: Platform) -> TestClient:
    return offline.client()


def test_an_unknown_path_is_not_found(client: TestClient) -> None:
    assert_problem(client.get("/nothing"), "not-found")


def test_the_instance_of_an_odd_path_is_a_uri(client: TestClient) -> None:
    body = assert_problem(client.get("/no such/页%00"), "not-found")
    assert body["instance"] == "/no%20such/%E9%A1%B5%00"


def test_a_wrong_method_names_the_allowed_ones(client: TestClient) -> None:
    response = client.delete("/predict")
    assert_problem(response, "method-not-allowed")
    assert response.headers["allow"] == "POST"


def test_a_trailing_slash_is_no_redirect(client: TestClient) -> None:
    assert_problem(client.get("/jobs/", follow_redirects=False), "not-found")


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe{}"])
def test_a_body_that_is_not_json_is_malformed_or_missing(client: TestClient, body: bytes) -> None:
    response = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert_problem(response, "invalid-request" if not body else "malformed-request")


def test_surrogates_in_raw_bytes_are_refused(client: TestClient) -> None:
    body = b'{"inputs": "\xed\xa0\x80"}'
    response = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert fields(assert_problem(response, "invalid-request")) == ["inputs"]


def test_excessive_nesting_is_malformed(client: TestClient) -> None:
    body = b"[" * 200_000 + b"]" * 200_000
    response = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert_problem(response, "malformed-request")


def test_a_number_of_five_thousand_digits_is_malformed(client: TestClient) -> None:
    body = b'{"inputs": ' + b"9" * 5000 + b"}"
    response = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert_problem(response, "malformed-request")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (r'"a\u0000b"', "NUL"),
        (r'"a\ud800b"', "surrogate"),
        ("NaN", "finite"),
        ("-Infinity", "finite"),
        ("1e999", "finite"),
        (str(2**63), "64 bits"),
        ("[" * 70 + "]" * 70, "nested"),
        (r'{"\u0000": 1}', "name"),
    ],
)
def test_values_that_cannot_be_stored_are_rejected_by_field(
    client: TestClient, value: str, message: str
) -> None:
    body = f'{{"kind": "teacher", "model": {{"config": {{"model_type": "x", "odd": {value}}}}}}}'
    response = client.post("/jobs", content=body, headers={"content-type": "application/json"})
    problem = assert_problem(response, "invalid-request")
    assert problem["errors"][0]["field"].startswith("model.config")
    assert message in problem["errors"][0]["message"]


def test_json_under_another_media_type_is_refused(client: TestClient) -> None:
    response = client.post(
        "/predict", content=b'{"inputs": "x"}', headers={"content-type": "text/plain"}
    )
    assert_problem(response, "invalid-request")


def test_a_wrong_value_is_named_by_its_path_in_the_body(client: TestClient) -> None:
    body = {**TEACHER, "training": {"epochs": -1, "batch_size": "many"}}
    problem = assert_problem(client.post("/jobs", json=body), "invalid-request")
    assert fields(problem) == ["training.epochs", "training.batch_size"]


def test_a_missing_field_is_named(client: TestClient) -> None:
    problem = assert_problem(
        client.post("/jobs", json={"kind": "teacher", "dataset_id": "ds_1"}), "invalid-request"
    )
    assert fields(problem) == ["model"]


def test_an_unknown_field_is_named(client: TestClient) -> None:
    body = {**TEACHER, "training": {"epoch": 1}}
    problem = assert_problem(client.post("/jobs", json=body), "invalid-request")
    assert fields(problem) == ["training.epoch"]


def test_an_unknown_kind_is_named(client: TestClient) -> None:
    problem = assert_problem(client.post("/jobs", json={"kind": "student"}), "invalid-request")
    assert "teacher" in problem["detail"]


def test_the_branches_of_a_union_do_not_leak_into_names(client: TestClient) -> None:
    body = {**TEACHER, "recipe": {"optimizer": "magic"}}
    problem = assert_problem(client.post("/jobs", json=body), "invalid-request")
    assert set(fields(problem)) == {"recipe.optimizer", "recipe"}


def test_contradictions_in_a_spec_have_messages_of_their_own(client: TestClient) -> None:
    body = {**TEACHER, "model": {"path": "a", "model_id": "b"}}
    problem = assert_problem(client.post("/jobs", json=body), "invalid-request")
    assert fields(problem) == ["model"]
    assert problem["errors"][0]["message"].startswith("give exactly one of path")


def test_many_errors_are_counted_and_the_first_twenty_listed(client: TestClient) -> None:
    body = {**TEACHER, **{f"unknown_{number}": 1 for number in range(50)}}
    problem = assert_problem(client.post("/jobs", json=body), "invalid-request")
    assert len(problem["errors"]) == 20
    assert "and 49 more" in problem["detail"]


def test_long_client_input_is_not_echoed(client: TestClient) -> None:
    body = {**TEACHER, "resources": {"host_memory": "x" * 100_000}}
    response = client.post("/jobs", json=body)
    assert_problem(response, "invalid-request")
    assert len(response.content) < 3000


def test_long_paths_and_values_are_truncated_in_problems(
    client: TestClient, offline: Platform
) -> None:
    offline.admission = Admission(offline.store, offline.settings, sandboxes().calculations)
    body = {**TEACHER, "model": {"path": "x" * 200_000}}
    response = offline.client().post("/jobs", json=body)
    assert fields(assert_problem(response, "invalid-request")) == ["model.path"]
    assert len(response.content) < 2000
    assert len(client.get("/" + "x" * 20_000).content) < 2000


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("limit=0", "query.limit"),
        ("limit=99999999999999999999999", "query.limit"),
        ("state=asleep", "query.state"),
        ("cursor=%00", "query.cursor"),
        ("kind=%ff", "query.kind"),
    ],
)
def test_a_wrong_query_is_named(client: TestClient, query: str, field: str) -> None:
    assert fields(assert_problem(client.get(f"/jobs?{query}"), "invalid-request")) == [field]


@pytest.mark.parametrize("id", ["%00", "job_%00", "..%2f..", "job_", "x" * 5000, "页"])
def test_a_malformed_id_is_not_found_without_a_query(client: TestClient, id: str) -> None:
    assert_problem(client.get(f"/jobs/{id}"), "not-found")


def test_an_unreachable_database_is_unavailable_with_retry_after(client: TestClient) -> None:
    response = client.get("/jobs/job_1")
    assert_problem(response, "unavailable")
    assert int(response.headers["retry-after"]) > 0


def test_an_unexpected_exception_reveals_no_internals(
    offline: Platform, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("secret")

    offline.probes["database"] = broken
    response = offline.client().get("/readyz")
    body = assert_problem(response, "internal")
    assert "secret" not in json.dumps(body)
    assert body["request_id"] == response.headers["x-request-id"]


def test_every_shared_error_maps_to_a_problem() -> None:
    samples = {
        shared.NotFound("job", "job_1"): "not-found",
        shared.InvalidRequest("no", field="name"): "invalid-request",
        shared.InvalidRequest("no"): "invalid-request",
        shared.Conflict("no"): "conflict",
        shared.InvalidTransition("job_1", "failed", "queued"): "invalid-transition",
        shared.GateNotPassed("mdl_1", "no"): "gate-not-passed",
        shared.QueueQuotaExceeded("ci", 1): "quota-exceeded",
        shared.StorageQuotaExceeded("ci", 2, 1): "storage-quota-exceeded",
        shared.InUse("model", "mdl_1", ["no"]): "in-use",
        shared.DoesNotFit("no", plan_document(verdict="does_not_fit")): "does-not-fit",
        shared.Unavailable("no"): "unavailable",
        shared.OldSchema("0001", "0002"): "unavailable",
    }
    assert {to_problem(error).slug for error in samples} == set(samples.values())
    for error, slug in samples.items():
        assert to_problem(error).slug == slug
    told = {type(error) for error in samples}
    known = {kind for kind in vars(shared).values() if isinstance(kind, type)}
    assert {k for k in known if issubclass(k, shared.StillhouseError)} - told == {
        shared.StillhouseError
    }
