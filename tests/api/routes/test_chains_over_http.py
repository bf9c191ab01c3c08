"""A chain over HTTP, with real plans: a teacher and its distillation in one request."""

from __future__ import annotations

from typing import Any

import pytest

from services.api.admission import Admission
from tests.api.harness import JobDriver
from tests.sandboxes import sandboxes

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 100,
}
SMALL = {"device": "cpu", "device_memory": "1KiB"}  # nothing fits into it


@pytest.fixture
def chain(desk: JobDriver) -> dict[str, Any]:
    """A chain that fits; the desk's server plans in earnest."""
    settings = desk.platform.settings
    desk.platform.admission = Admission(desk.store, settings, sandboxes().calculations)
    desk.client = desk.platform.client()
    resources = {"device": "cpu", "device_memory": "8GiB"}
    model = {"config": CONFIG, "tokenizer": {"train": True}}
    student: dict[str, Any] = {"layers_of_teacher": 2}
    return {
        "kind": "chain",
        "teacher": {"dataset_id": desk.dataset_id, "model": model, "resources": resources},
        "distill": {"student": student, "resources": resources, "promote": "when_passed"},
    }


def test_a_chain_is_accepted_planned_stored_and_its_teacher_sent(
    desk: JobDriver, chain: dict[str, Any]
) -> None:
    response = desk.submit(chain)
    assert response.status_code == 202
    teacher = response.json()
    assert response.headers["location"] == f"/jobs/{teacher['id']}"
    child = desk.client.get(f"/jobs/{teacher['child_job_ids'][0]}").json()
    assert (teacher["kind"], teacher["state"]) == ("teacher", "queued")
    assert (child["kind"], child["state"]) == ("distill", "waiting")
    assert child["parent_job_id"] == teacher["id"]
    assert child["spec"]["promote"] == "when_passed"
    assert desk.platform.sent == [(teacher["id"], "teacher")]
    assert teacher["plan"] != child["plan"]
    assert "teacher_placement" in child["plan"]
    (layers,) = [
        each for each in child["plan"]["decisions"] if each["field"] == "student.layers_of_teacher"
    ]
    assert (layers["value"], layers["basis"]) == (2, "teacher")
    assert layers["why"].startswith("layers 1, 3 of the teacher's 4, counted from 0")


@pytest.mark.parametrize("layers", [4, [0, 4]])
def test_layers_that_the_teacher_will_not_have_are_refused_before_it_is_trained(
    desk: JobDriver, chain: dict[str, Any], layers: int | list[int]
) -> None:
    chain["distill"]["student"]["layers_of_teacher"] = layers
    response = desk.submit(chain)
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error["field"] == "distill.student.layers_of_teacher"
    assert "4" in response.json()["detail"]
    assert desk.client.get("/jobs").json()["items"] == []


def test_the_plan_of_a_chain_is_both_plans_and_stores_nothing(
    desk: JobDriver, chain: dict[str, Any]
) -> None:
    plans = desk.client.post("/jobs/plan", json=chain).json()
    assert desk.client.get("/jobs").json()["items"] == []
    teacher = desk.submit(chain).json()
    child = desk.client.get(f"/jobs/{teacher['child_job_ids'][0]}").json()
    assert plans == {"teacher": teacher["plan"], "distill": child["plan"]}


@pytest.mark.parametrize("part", ["teacher", "distill"])
def test_the_part_that_does_not_fit_is_named_and_neither_is_stored(
    desk: JobDriver, chain: dict[str, Any], part: str
) -> None:
    chain[part]["resources"] = SMALL
    response = desk.submit(chain)
    body = response.json()
    assert (response.status_code, body["type"]) == (422, "urn:stillhouse:problem:does-not-fit")
    assert [error["field"] for error in body["errors"]] == [part]
    assert body["detail"].startswith(f"{part}: The job needs ")
    assert body["plan"]["verdict"] == "does_not_fit"
    assert desk.client.get("/jobs").json()["items"] == []
    assert desk.platform.sent == []
    plans = desk.client.post("/jobs/plan", json=chain).json()
    verdicts = {name: plan["verdict"] for name, plan in plans.items()}
    assert verdicts == {"teacher": "fits", "distill": "fits"} | {part: "does_not_fit"}


def test_the_same_key_and_chain_give_the_same_pair_and_one_message(
    desk: JobDriver, chain: dict[str, Any]
) -> None:
    first, second = (desk.submit(chain, **{"Idempotency-Key": "k"}) for _ in range(2))
    assert first.json() == second.json()
    assert second.headers["idempotent-replayed"] == "true"
    assert len(desk.platform.sent) == 1
    chain["distill"]["name"] = "other"
    third = desk.submit(chain, **{"Idempotency-Key": "k"})
    assert third.status_code == 422
    assert third.json()["errors"][0]["field"] == "Idempotency-Key"


@pytest.mark.parametrize("path", ["/jobs", "/jobs/plan"])
@pytest.mark.parametrize(
    ("part", "fields", "named"),
    [
        ("teacher", {"dataset_id": "ds_none"}, "teacher.dataset_id"),
        ("teacher", {"model": {"model_id": "../x"}}, "teacher.model.model_id"),
        ("teacher", {"model": {"path": "none"}}, "teacher.model.path"),
        ("teacher", {"training": {"epochs": -1}}, "teacher.training.epochs"),
        ("distill", {"dataset_id": "ds_none"}, "distill.dataset_id"),
        ("distill", {"student": {"model_id": "mdl_none"}}, "distill.student.model_id"),
        ("distill", {"student": {"path": "none"}}, "distill.student.path"),
        ("distill", {"teacher": {"job_id": "job_1"}}, "distill.teacher"),
        ("distill", {"gate": {"share": 1}}, "distill.gate.share"),
    ],
)
def test_what_is_wrong_with_a_part_is_named(
    desk: JobDriver, chain: dict[str, Any], path: str, part: str, fields: dict[str, Any], named: str
) -> None:
    chain[part] |= fields
    response = desk.client.post(path, json=chain)
    assert response.status_code == 422
    assert [error["field"] for error in response.json()["errors"]] == [named]
    assert desk.client.get("/jobs").json()["items"] == []


def test_a_teacher_that_fails_fails_its_distillation(
    desk: JobDriver, chain: dict[str, Any]
) -> None:
    claim = desk.running(chain)
    desk.fail(claim)
    (child_id,) = desk.client.get(f"/jobs/{claim.job_id}").json()["child_job_ids"]
    child = desk.client.get(f"/jobs/{child_id}").json()
    assert (child["state"], child["reason"]) == ("failed", "parent_failed")
    assert child["message"] == f"Its teacher job {claim.job_id} is failed: Too much."


def test_retrying_the_teacher_of_a_chain_repeats_all_of_it(
    desk: JobDriver, chain: dict[str, Any]
) -> None:
    claim = desk.running(chain)
    desk.fail(claim)
    again = desk.client.post(f"/jobs/{claim.job_id}/retry").json()
    (child_id,) = again["child_job_ids"]
    child = desk.client.get(f"/jobs/{child_id}").json()
    assert child["state"] == "waiting"
    assert child["spec"]["teacher"]["job_id"] == again["id"]
    assert child["plan"] is not None


def test_a_cancelled_teacher_fails_its_distillation(desk: JobDriver, chain: dict[str, Any]) -> None:
    teacher = desk.submit(chain).json()
    desk.client.post(f"/jobs/{teacher['id']}/cancel")
    child = desk.client.get(f"/jobs/{teacher['child_job_ids'][0]}").json()
    assert (child["state"], child["reason"]) == ("failed", "parent_failed")


def test_a_student_that_passes_its_gate_is_promoted(desk: JobDriver, chain: dict[str, Any]) -> None:
    claim = desk.running(chain)
    desk.succeed(claim)
    (child_id,) = desk.client.get(f"/jobs/{claim.job_id}").json()["child_job_ids"]
    child = desk.store.claim(child_id, worker="w", lease_seconds=60)
    assert child is not None
    heads = {"heads": {"sentiment": {"macro_f1": 0.9}}}
    student = desk.succeed(child, heads | {"teacher": heads})
    promotions = desk.client.get("/promotions").json()["items"]
    assert [promotion["model_id"] for promotion in promotions] == [student]
