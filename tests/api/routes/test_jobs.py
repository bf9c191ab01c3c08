"""Jobs over HTTP, on a real database: submit, list, show, cancel, retry, promote."""

from __future__ import annotations

from typing import Any

import pytest

from services.shared.jobs.documents import ProgressDict
from services.shared.jobs.spec import Recipe
from services.shared.jobs.state import Phase
from tests.api.harness import JobDriver


def problem(response: Any, status: int, slug: str) -> dict[str, Any]:
    assert (response.status_code, response.headers["content-type"]) == (
        status,
        "application/problem+json",
    )
    body: dict[str, Any] = response.json()
    assert body["type"].endswith(f":{slug}")
    return body


def test_a_job_is_accepted_planned_stored_and_sent(desk: JobDriver) -> None:
    response = desk.submit()
    assert response.status_code == 202
    job = response.json()
    assert response.headers["location"] == f"/jobs/{job['id']}"
    assert (job["state"], job["kind"]) == ("queued", "teacher")
    assert job["plan"]["peak_bytes"] == 7
    assert desk.platform.sent == [(job["id"], "teacher")]
    assert desk.client.get(response.headers["location"]).json() == job


def test_a_job_that_does_not_fit_is_refused_with_its_plan(desk: JobDriver) -> None:
    desk.platform.fake_admission.refuses = True
    body = problem(desk.submit(), 422, "does-not-fit")
    assert body["plan"]["verdict"] == "does_not_fit"
    assert desk.client.get("/jobs").json()["items"] == []
    assert desk.platform.sent == []


def test_an_unreachable_broker_loses_no_job(desk: JobDriver) -> None:
    desk.platform.broker_is_away = True
    response = desk.submit()
    assert response.status_code == 202
    assert desk.client.get(response.headers["location"]).json()["state"] == "queued"


def test_the_same_key_and_body_give_the_same_job_and_one_message(desk: JobDriver) -> None:
    first, second = (desk.submit(**{"Idempotency-Key": "k"}) for _ in range(2))
    assert first.json()["id"] == second.json()["id"]
    assert second.status_code == 202
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert len(desk.platform.sent) == 1


def test_the_same_key_with_another_body_is_refused(desk: JobDriver) -> None:
    desk.submit(**{"Idempotency-Key": "k"})
    response = desk.submit(desk.spec(name="other"), **{"Idempotency-Key": "k"})
    body = problem(response, 422, "invalid-request")
    assert body["errors"][0]["field"] == "Idempotency-Key"


@pytest.mark.parametrize("key", ["", " ", "k" * 201, "\u00e9"])
def test_an_impossible_key_is_refused(desk: JobDriver, key: str) -> None:
    response = desk.client.post(
        "/jobs", json=desk.spec(), headers={b"Idempotency-Key": key.encode()}
    )
    body = problem(response, 422, "invalid-request")
    assert body["errors"][0]["field"] == "header.Idempotency-Key"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"dataset_id": "ds_none"}, "dataset_id"),
        ({"heads": ["mood"]}, "heads"),
        ({"model": {"model_id": "mdl_none"}}, "model.model_id"),
    ],
)
def test_a_reference_that_does_not_exist_is_named(
    desk: JobDriver, fields: dict[str, Any], named: str
) -> None:
    body = problem(desk.submit(desk.spec(**fields)), 422, "invalid-request")
    assert [error["field"] for error in body["errors"]] == [named]


def test_a_distillation_waits_for_its_teacher_and_is_not_sent(desk: JobDriver) -> None:
    teacher = desk.submit().json()["id"]
    child = desk.submit(desk.distill(job_id=teacher)).json()
    assert (child["state"], child["parent_job_id"]) == ("waiting", teacher)
    assert desk.platform.sent == [(teacher, "teacher")]
    assert desk.client.get(f"/jobs/{teacher}").json()["child_job_ids"] == [child["id"]]


def test_a_plan_stores_nothing(desk: JobDriver) -> None:
    assert desk.client.post("/jobs/plan", json=desk.spec()).json()["verdict"] == "fits"
    assert desk.client.get("/jobs").json()["items"] == []


def test_a_plan_that_does_not_fit_is_a_successful_response(desk: JobDriver) -> None:
    desk.platform.fake_admission.refuses = True
    response = desk.client.post("/jobs/plan", json=desk.spec())
    assert (response.status_code, response.json()["verdict"]) == (200, "does_not_fit")


def test_pages_go_from_the_newest_to_the_oldest_without_gaps(desk: JobDriver) -> None:
    ids = [desk.submit(desk.spec(name=f"job {number}")).json()["id"] for number in range(5)]
    seen: list[str] = []
    cursor = ""
    while cursor is not None:
        page = desk.client.get(f"/jobs?limit=2{cursor and '&cursor=' + cursor}").json()
        seen += [job["id"] for job in page["items"]]
        cursor = page["next_cursor"]
    assert seen == ids[::-1]


def test_lists_are_filtered_by_state_and_kind(desk: JobDriver) -> None:
    teacher = desk.submit().json()["id"]
    child = desk.submit(desk.distill(job_id=teacher)).json()["id"]
    for query, wanted in [
        ("state=queued", [teacher]),
        ("state=waiting", [child]),
        ("kind=distill", [child]),
        ("state=queued&kind=distill", []),
    ]:
        page = desk.client.get(f"/jobs?{query}").json()
        assert [job["id"] for job in page["items"]] == wanted


@pytest.mark.parametrize("path", ["/jobs/job_0", "/models/mdl_0", "/jobs/job_0/events"])
def test_an_unknown_id_is_not_found(desk: JobDriver, path: str) -> None:
    problem(desk.client.get(path), 404, "not-found")


def test_a_second_cancel_is_harmless(desk: JobDriver) -> None:
    job_id = desk.submit().json()["id"]
    for _ in range(2):
        response = desk.client.post(f"/jobs/{job_id}/cancel")
        assert (response.status_code, response.json()["state"]) == (202, "cancelled")


def test_a_running_job_is_requested_to_stop(desk: JobDriver) -> None:
    claim = desk.running()
    response = desk.client.post(f"/jobs/{claim.job_id}/cancel")
    assert response.json()["state"] == "cancelling"


def test_a_job_that_has_ended_is_not_cancelled(desk: JobDriver) -> None:
    claim = desk.running()
    desk.fail(claim)
    problem(desk.client.post(f"/jobs/{claim.job_id}/cancel"), 409, "invalid-transition")


def test_a_retry_takes_the_changes_and_names_the_former_job(desk: JobDriver) -> None:
    claim = desk.running()
    desk.fail(claim)
    body = {"changes": {"optimizer": "adafactor"}, "training": {"micro_batch_tokens": 512}}
    response = desk.client.post(f"/jobs/{claim.job_id}/retry", json=body)
    assert response.status_code == 202
    job = response.json()
    assert job["retry_of"] == claim.job_id
    assert job["recipe"]["optimizer"] == "adafactor"
    assert job["spec"]["training"]["micro_batch_tokens"] == 512
    assert desk.platform.sent[-1] == (job["id"], "teacher")
    recipe = desk.platform.fake_admission.seen[-1].recipe
    assert isinstance(recipe, Recipe)
    assert recipe.optimizer == "adafactor"


def test_a_retry_needs_no_body(desk: JobDriver) -> None:
    claim = desk.running()
    desk.fail(claim)
    assert desk.client.post(f"/jobs/{claim.job_id}/retry").status_code == 202


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"changes": {"optimiser": "sgd"}}, "changes.optimiser"),
        ({"changes": {"optimizer": "magic"}}, "changes.optimizer"),
        ({"training": {"epochs": -1}}, "training.epochs"),
        ({"training": {"epochs": None}}, "training.epochs"),
        ({"training": {"batch_size": True}}, "training.batch_size"),
    ],
)
def test_a_wrong_change_is_named(desk: JobDriver, changes: dict[str, Any], named: str) -> None:
    claim = desk.running()
    desk.fail(claim)
    response = desk.client.post(f"/jobs/{claim.job_id}/retry", json=changes)
    body = problem(response, 422, "invalid-request")
    assert [error["field"] for error in body["errors"]] == [named]


def test_a_job_that_runs_is_not_retried(desk: JobDriver) -> None:
    claim = desk.running()
    problem(desk.client.post(f"/jobs/{claim.job_id}/retry"), 409, "invalid-transition")


def test_a_retry_that_does_not_fit_is_refused(desk: JobDriver) -> None:
    claim = desk.running()
    desk.fail(claim)
    desk.platform.fake_admission.refuses = True
    problem(desk.client.post(f"/jobs/{claim.job_id}/retry"), 422, "does-not-fit")


def test_a_model_is_listed_shown_and_promoted(desk: JobDriver) -> None:
    model_id = desk.succeed(desk.running())
    assert desk.client.get("/models").json()["items"][0]["id"] == model_id
    assert desk.client.get(f"/models/{model_id}").json()["heads"][0]["name"] == "sentiment"
    response = desk.client.post(f"/models/{model_id}/promote")
    assert response.status_code == 201
    assert response.json()["alias"] == "default"
    promotions = desk.client.get("/promotions").json()["items"]
    assert [promotion["model_id"] for promotion in promotions] == [model_id]


def test_a_failed_jobs_model_is_not_promoted(desk: JobDriver) -> None:
    claim = desk.running()
    desk.fail(claim)
    problem(desk.client.post(f"/models/{claim.job_id}/promote"), 409, "conflict")


def test_the_gate_holds_unless_forced_with_a_reason(desk: JobDriver) -> None:
    teacher = desk.succeed(desk.running())
    weak = {
        "heads": {"sentiment": {"macro_f1": 0.5}},
        "teacher": {"heads": {"sentiment": {"macro_f1": 0.9}}},
    }
    student = desk.succeed(desk.running(desk.distill(model_id=teacher)), weak)
    path = f"/models/{student}/promote"
    problem(desk.client.post(path), 409, "gate-not-passed")
    body = problem(desk.client.post(path, json={"force": True}), 422, "invalid-request")
    assert body["errors"][0]["field"] == "reason"
    forced = desk.client.post(path, json={"force": True, "reason": "a trial"})
    assert (forced.status_code, forced.json()["forced"]) == (201, True)


@pytest.mark.parametrize("alias", ["", "Default", "a/b", "a" * 65, "1a"])
def test_an_impossible_alias_is_named(desk: JobDriver, alias: str) -> None:
    model_id = desk.succeed(desk.running())
    response = desk.client.post(f"/models/{model_id}/promote", json={"alias": alias})
    body = problem(response, 422, "invalid-request")
    assert body["errors"][0]["field"] == "alias"


def test_progress_of_a_running_job_is_shown(desk: JobDriver) -> None:
    claim = desk.running()
    progress: ProgressDict = {"step": 3, "loss": float("nan"), "eta_seconds": 12.5}
    desk.store.heartbeat(claim, phase=Phase.TRAINING, progress=progress, lease_seconds=60)
    job = desk.client.get(f"/jobs/{claim.job_id}").json()
    assert (job["phase"], job["progress"]["step"]) == ("training", 3)
    assert job["progress"]["loss"] is None
