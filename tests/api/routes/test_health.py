"""Probes, metrics, headers, and imports of the process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.shared.jobs.db.migrations.upgrade import migrate
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.run_directory import Report
from tests.api.fakes import FakeStudent
from tests.api.harness import JobDriver, Platform

HEAVY = ["torch", "transformers", "accelerate"]


def unreachable() -> None:
    raise Unavailable("unreachable")


def test_liveness_checks_no_dependency(offline: Platform) -> None:
    offline.probes = {"database": unreachable}
    assert offline.client().get("/livez").json() == {"status": "ok"}


def test_readiness_names_each_dependency(offline: Platform) -> None:
    offline.probes = {"database": lambda: None, "broker": lambda: None}
    body = offline.client().get("/readyz").json()
    assert {name: part["ok"] for name, part in body["parts"].items()} == {
        "database": True,
        "broker": True,
    }


def test_not_ready_is_a_problem_that_names_the_failed_dependency(offline: Platform) -> None:
    offline.probes = {"database": lambda: None, "broker": unreachable}
    response = offline.client().get("/readyz")
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"]
    assert "broker" in response.json()["detail"]
    assert response.json()["parts"]["database"]["ok"] is True


def test_an_old_schema_is_not_ready_and_says_what_to_do(
    platform: Platform, database_url: str
) -> None:
    platform.probes = {"schema": platform.store.check_schema}
    client = platform.client()
    assert client.get("/readyz").status_code == 200
    migrate(database_url, target="0003")  # as a database that an older version has migrated
    response = client.get("/readyz")
    assert response.status_code == 503
    assert "has schema version 0003" in response.json()["detail"]
    assert "services.shared.jobs.db.migrations" in response.json()["detail"]
    assert client.get("/jobs").status_code == 503


def test_health_lists_served_models_while_a_dependency_is_down(
    offline: Platform, two_heads: FakeStudent
) -> None:
    offline.probes = {"broker": unreachable}
    offline.predictor.students["default"] = two_heads
    response = offline.client().get("/health")
    assert response.status_code == 200
    body = response.json()
    assert body["status"] == "degraded"
    assert body["models"]["default"]["heads"] == ["sentiment", "domain"]


def test_metrics_have_one_prefix_and_label_routes_not_paths(
    offline: Platform, one_head: FakeStudent
) -> None:
    offline.predictor.students["default"] = one_head
    client = offline.client()
    client.get("/jobs/job_1")
    client.get("/never/heard/of")
    client.request("BREW", "/jobs")
    text = client.get("/metrics").text
    names = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert {name for name in names if not name.startswith("stillhouse_")} == set()
    assert 'method="GET",route="/jobs/{job_id}",status="503"' in text
    assert 'route="unmatched",status="404"' in text
    assert 'method="other"' in text
    assert 'stillhouse_model_info{alias="default",model="reviews",version="mdl_1_1"} 1.0' in text
    assert "job_1" not in text


def test_every_response_carries_the_same_headers(offline: Platform) -> None:
    client = offline.client()
    for path in ("/livez", "/nothing", "/jobs/job_1"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert len(headers["x-request-id"]) == 16


@pytest.mark.parametrize("module", ["services.api.app", "services.api.main"])
def test_the_application_is_imported_without_torch(module: str) -> None:
    code = f"import sys, {module}; print([n for n in {HEAVY} if n in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_metrics_report_the_plan_error_of_finished_jobs(desk: JobDriver) -> None:
    for measured in (8, 14):
        claim = desk.running()
        outcome = Outcome(
            end=End.SUCCEEDED,
            report=Report(outcome="succeeded"),
            measured={"0": {"forward": measured}, "1": {"forward": 7}},
            observed={"0": {"basis": "allocator"}, "1": {"basis": "allocator"}},
        )
        desk.end(claim, outcome)
    text = desk.client.get("/metrics").text
    labels = 'stillhouse_plan_error_ratio{device="cpu",phase="forward",statistic='
    assert f'{labels}"worst"}} 1.0' in text
    assert f'{labels}"mean"}} 0.57' in text  # of 1/7 and 7/7: planned were 7 bytes
    assert 'stillhouse_plan_error_jobs{device="cpu",phase="forward"} 2.0' in text


def test_metrics_are_served_while_the_database_is_unreachable(offline: Platform) -> None:
    response = offline.client().get("/metrics")
    assert response.status_code == 200
    assert "stillhouse_plan_error" not in response.text
