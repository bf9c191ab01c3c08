"""What every write has in common: the audit log, and maintenance mode."""

from __future__ import annotations

import json

import pytest
import structlog
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from services.api.app import create_app
from services.api.auth.keys import Scope
from services.api.writes import STORES_NOTHING
from services.shared.jobs.db.audit import AuditEntry, AuditLog
from services.shared.jobs.db.connection import create_engine
from services.shared.jobs.db.maintenance import Maintenance
from services.shared.jobs.projects import Access
from tests.api.auth.key_entries import bearer, keys_of
from tests.api.conftest import NOWHERE
from tests.api.fakes import FakeStudent
from tests.api.harness import JobDriver, Platform
from tests.factories import SENTIMENT, dataset_card

KEYS = keys_of(
    ci=("ours", [Scope.SUBMIT, Scope.PROMOTE]),
    reader=("ours", [Scope.READ]),
    root=("default", [Scope.ADMIN]),
)


@pytest.fixture
def client(platform: Platform) -> TestClient:
    platform.keys = KEYS
    return platform.client()


def entries(client: TestClient, **wanted: str) -> list[dict[str, object]]:
    page = client.get("/audit", params=wanted, headers=bearer("root")).json()
    found: list[dict[str, object]] = page["items"]
    return found


def test_a_job_is_followed_through_the_audit_log(platform: Platform, client: TestClient) -> None:
    driver = JobDriver(platform)
    store = platform.store.within(Access(project="ours"))
    spec = driver.spec(dataset_id=store.add_dataset(dataset_card()).id)
    job = client.post("/jobs", json=spec, headers=bearer("ci")).json()["id"]
    client.post(f"/jobs/{job}/cancel", headers=bearer("ci"))
    client.post(f"/jobs/{job}/retry", headers=bearer("ci"))
    client.post(f"/jobs/{job}/cancel", headers=bearer("reader"))
    found = [
        (e["key_name"], e["project"], e["action"], e["target"] or e["created"], e["status"])
        for e in entries(client, target=job)
    ]
    assert found == [
        ("reader", "ours", "cancel_job", job, 403),
        ("ci", "ours", "retry_job", job, 202),
        ("ci", "ours", "cancel_job", job, 202),
        ("ci", "ours", "create_job", job, 202),
    ]
    newest = entries(client, target=job, key="ci")[0]
    assert newest["outcome"] == "done"
    assert newest["created"] != job
    assert newest["address"]
    assert newest["key_id"]
    assert entries(client, key="nobody") == []


def test_the_audit_log_is_paged(platform: Platform, client: TestClient) -> None:
    for number in range(5):
        client.post(f"/jobs/job_{number}/cancel", headers=bearer("ci"))
    first = client.get("/audit?limit=3", headers=bearer("root")).json()
    rest = client.get(f"/audit?cursor={first['next_cursor']}", headers=bearer("root")).json()
    targets = [entry["target"] for entry in [*first["items"], *rest["items"]]]
    assert targets == [f"job_{number}" for number in (4, 3, 2, 1, 0)]
    assert {entry["outcome"] for entry in first["items"]} == {"refused"}


def test_every_route_that_writes_is_recorded(platform: Platform, client: TestClient) -> None:
    """By the method alone: a route added later is recorded without further code."""
    reading = {"GET", "HEAD", "OPTIONS"}
    routes = [
        (method, route)
        for route in _routes(platform)
        for method in (route.methods or set()) - reading
        if route.path not in STORES_NOTHING
    ]
    assert len(routes) > 8
    for method, route in routes:
        path = route.path.replace("{job_id}", "job_0").replace("{model_id}", "mdl_0")
        client.request(method, path.replace("{dataset_id}", "ds_0"), headers=bearer("ci"))
    recorded = {entry["action"] for entry in entries(client, key="ci")}
    assert recorded == {route.operation_id for _, route in routes}


def _routes(platform: Platform) -> list[APIRoute]:
    def walk(routes: object) -> list[APIRoute]:
        found = []
        for route in routes:  # type: ignore[attr-defined]
            if isinstance(route, APIRoute):
                found.append(route)
            else:
                router = getattr(route, "original_router", None)
                found += walk(router.routes) if router is not None else []
        return found

    return walk(create_app(platform.context()).routes)


def test_what_stores_nothing_is_not_recorded(platform: Platform, client: TestClient) -> None:
    platform.predictor.students["default"] = FakeStudent("s", "v", [SENTIMENT])
    client.post("/predict", json={"inputs": "a"}, headers=bearer("root"))
    client.post("/diagnoses", json={"log": "x"}, headers=bearer("root"))
    client.get("/jobs", headers=bearer("root"))
    assert entries(client) == []


def test_entries_outlive_an_outage_of_the_database(platform: Platform) -> None:
    log = AuditLog(create_engine(NOWHERE))
    entry = AuditEntry(key_name="ci", action="cancel_job", target="job_1", outcome="done")
    with structlog.testing.capture_logs() as logged:
        log.record(entry)
    assert logged[0]["event"] == "audit_not_stored"
    assert (logged[0]["key_name"], logged[0]["target"]) == ("ci", "job_1")
    log._engine = platform.store.engine
    log.record(AuditEntry(key_name="ci", action="cancel_job", target="job_2", outcome="done"))
    assert [e.target for e in log.page().items] == ["job_1", "job_2"]


def test_maintenance_refuses_writes_with_the_reason_and_answers_reads(
    platform: Platform, client: TestClient
) -> None:
    platform.predictor.students["default"] = FakeStudent("s", "v", [SENTIMENT])
    on = {"on": True, "reason": "a new disk, until 18:00"}
    assert client.post("/maintenance", json=on, headers=bearer("ci")).status_code == 403
    assert client.post("/maintenance", json={"on": True}, headers=bearer("root")).status_code == 422
    assert client.post("/maintenance", json=on, headers=bearer("root")).json()["on"] is True
    refused = client.post("/jobs/job_1/cancel", headers=bearer("ci"))
    assert refused.status_code == 503
    assert refused.json()["type"].endswith(":maintenance")
    assert "a new disk, until 18:00" in refused.json()["detail"]
    assert refused.headers["retry-after"]
    assert client.delete("/datasets/ds_1", headers=bearer("ci")).status_code == 503
    assert client.get("/jobs", headers=bearer("ci")).status_code == 200
    assert client.get("/readyz").status_code == 200
    predicted = client.post("/predict", json={"inputs": "a"}, headers=bearer("root"))
    assert predicted.status_code == 200
    shown = client.get("/maintenance", headers=bearer("reader")).json()
    assert (shown["on"], shown["current"]["started_by"]) == (True, "root")
    assert client.post("/maintenance", json={"on": False}, headers=bearer("root")).json() == {
        "on": False,
        "current": None,
    }
    assert client.post("/jobs/job_1/cancel", headers=bearer("ci")).status_code == 404
    assert [entry["action"] for entry in entries(client, key="root")] == ["set_maintenance"] * 3


def test_the_reason_of_maintenance_can_be_changed(platform: Platform) -> None:
    maintenance = Maintenance(platform.store.engine)
    assert maintenance.current() is None
    maintenance.start(reason="one", by="a")
    maintenance.start(reason="two", by="b")
    current = maintenance.current()
    assert current is not None
    assert json.loads(current.model_dump_json())["reason"] == "two"
