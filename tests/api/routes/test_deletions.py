"""Deletion and restoration over HTTP: scopes, refusals, and who did it."""

from __future__ import annotations

import hashlib

import pytest

from services.api.auth.keys import ApiKey, Keys, Scope
from tests.api.harness import JobDriver
from tests.api.schema_check import SchemaCheck


def test_a_job_a_model_and_a_dataset_are_deleted_and_restored(desk: JobDriver) -> None:
    schemas = SchemaCheck(desk.client.get("/openapi.json").json())
    claim = desk.running()
    model_id = desk.succeed(claim)
    for resource, id in (
        ("jobs", claim.job_id),
        ("models", model_id),
        ("datasets", desk.dataset_id),
    ):
        path = f"/{resource}/{id}"
        deleted = desk.client.delete(path)
        assert deleted.status_code == 200, deleted.text
        schemas.check(
            deleted.json(), schemas.response("delete", f"/{resource}/{{{resource[:-1]}_id}}")
        )
        assert deleted.json()["deleted_by"] == "local"
        assert desk.client.get(f"/{resource}").json()["items"] == []
        listed = desk.client.get(f"/{resource}?deleted=true").json()["items"]
        assert [item["id"] for item in listed] == [id]
        assert desk.client.get(path).json()["deleted_at"] is not None
        assert desk.client.post(f"{path}/restore").json()["deleted_at"] is None
        assert [item["id"] for item in desk.client.get(f"/{resource}").json()["items"]] == [id]


def test_a_refusal_lists_what_refers_to_the_resource(desk: JobDriver) -> None:
    jobs = [desk.submit().json()["id"] for _ in range(3)]
    answer = desk.client.delete(f"/datasets/{desk.dataset_id}")
    assert answer.status_code == 409
    assert answer.json()["type"] == "urn:stillhouse:problem:in-use"
    assert answer.json()["references"] == [f"job {job_id} (queued) uses it" for job_id in jobs]
    assert "(and 2 more; see references)" in answer.json()["detail"]


def test_a_model_is_deleted_by_the_id_of_its_job_unless_an_alias_serves_it(desk: JobDriver) -> None:
    claim = desk.running()
    model_id = desk.succeed(claim)
    desk.client.post(f"/models/{model_id}/promote")
    refused = desk.client.delete(f"/models/{claim.job_id}")
    assert refused.json()["references"] == ["alias default serves it: promote another model first"]


@pytest.mark.parametrize(
    ("scope", "allowed"),
    [
        (Scope.PREDICT, set()),
        (Scope.SUBMIT, {"datasets", "jobs"}),
        (Scope.PROMOTE, {"models"}),
        (Scope.ADMIN, {"datasets", "jobs", "models"}),
    ],
)
def test_deletion_needs_the_scope_that_makes_the_resource(
    desk: JobDriver, scope: Scope, allowed: set[str]
) -> None:
    key = ApiKey(sha256=hashlib.sha256(b"k").hexdigest(), scopes=frozenset({scope}))
    desk.platform.keys = Keys({"ops": key})
    client = desk.platform.client()
    client.headers["Authorization"] = "Bearer k"
    for resource, id in (("datasets", "ds_1"), ("jobs", "job_1"), ("models", "mdl_1_1")):
        for answer in (
            client.delete(f"/{resource}/{id}"),
            client.post(f"/{resource}/{id}/restore"),
        ):
            assert answer.status_code == (404 if resource in allowed else 403)


def test_the_name_of_the_key_is_recorded_with_what_it_makes_and_deletes(desk: JobDriver) -> None:
    claim = desk.running()
    desk.succeed(claim)
    key = ApiKey(sha256=hashlib.sha256(b"k").hexdigest(), scopes=frozenset({Scope.SUBMIT}))
    desk.platform.keys = Keys({"ci": key})
    client = desk.platform.client()
    client.headers["Authorization"] = "Bearer k"
    assert client.post("/jobs", json=desk.spec()).json()["created_by"] == "ci"
    assert client.delete(f"/jobs/{claim.job_id}").json()["deleted_by"] == "ci"
