"""Deletion and restoration over HTTP: scopes, refusals, and who did it."""

from __future__ import annotations

import hashlib

import pytest

from services.api.auth.keys import ApiKey, Keys, Scope
from services.api.settings import ApiSettings
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.lifecycle.epoch import check_epoch, tick_epoch
from services.shared.jobs.lifecycle.usage import sample_usage
from services.shared.jobs.quota import Quota
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


def test_a_key_beyond_its_quota_is_refused_with_what_helps(desk: JobDriver) -> None:
    quota = Quota(queued_jobs=1)
    sha256 = hashlib.sha256(b"k").hexdigest()
    key = ApiKey(sha256=sha256, scopes=frozenset({Scope.SUBMIT}), quota=quota)
    desk.platform.keys = Keys({"ci": key})
    client = desk.platform.client()
    client.headers["Authorization"] = "Bearer k"
    first = client.post("/jobs", json=desk.spec(), headers={"Idempotency-Key": "one"})
    assert first.status_code == 202
    refused = client.post("/jobs", json=desk.spec())
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "30"
    assert refused.json()["type"] == "urn:stillhouse:problem:quota-exceeded"
    again = client.post("/jobs", json=desk.spec(), headers={"Idempotency-Key": "one"})
    assert again.json()["id"] == first.json()["id"]


ROWS = "".join(f'{{"text": "text {n}", "mood": "{"ab"[n % 2]}"}}\n' for n in range(40)).encode()


@pytest.mark.parametrize(
    ("settings", "status", "slug"),
    [
        ({"disk_full_share": 1e-9}, 507, "disk-full"),
        ({"quota": {"stored_bytes": 100}}, 403, "storage-quota-exceeded"),
    ],
)
def test_an_upload_for_which_there_is_no_room_is_refused_before_it_is_read(
    desk: JobDriver, settings: dict[str, object], status: int, slug: str
) -> None:
    known = desk.platform.settings.model_dump()
    desk.platform.settings = ApiSettings(**{**known, **settings})
    desk.platform.store.settings = desk.platform.settings
    refused = desk.platform.client().post(
        "/datasets", files={"file": ("m.jsonl", ROWS)}, data={"heads": '[{"name": "mood"}]'}
    )
    assert refused.status_code == status, refused.text
    assert refused.json()["type"] == f"urn:stillhouse:problem:{slug}"
    assert list(desk.platform.settings.datasets_dir.iterdir()) == []


def test_metrics_and_readiness_show_storage_and_a_mismatch_of_database_and_files(
    desk: JobDriver,
) -> None:
    lifecycle = LifecycleStore(desk.store)
    desk.platform.probes = {"epoch": lambda: check_epoch(lifecycle)}
    client = desk.platform.client()
    tick_epoch(lifecycle)
    sample_usage(lifecycle)
    assert client.get("/readyz").status_code == 200
    text = client.get("/metrics").text
    assert 'stillhouse_stored_bytes{kind="database"}' in text
    assert "stillhouse_epoch_mismatch 0.0" in text
    (desk.platform.settings.data_dir / "epoch.json").unlink()
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert "epoch.json is missing" in answer.json()["detail"]
    assert "epoch.json is missing" in answer.json()["parts"]["epoch"]["problem"]
    assert "stillhouse_epoch_mismatch 1.0" in client.get("/metrics").text
