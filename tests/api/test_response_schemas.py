"""OpenAPI describes plans, jobs, memory and diagnoses, and the bodies are as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient

from services.api.admission import Admission
from services.shared.jobs.documents import FailureDict
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.run_directory import MemoryRecord, RunDirectory, append_record
from services.shared.jobs.state import Phase, Reason
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from tests.api.harness import JobDriver
from tests.api.schema_check import SchemaCheck
from tests.factories import TINY_QWEN3, TINY_STUDENT, diagnosis_document, plan_document
from tests.sandboxes import sandboxes

REPORTS = json.loads((Path(__file__).parents[1] / "data" / "oom_reports.json").read_text())
TEACHER = {"config": TINY_QWEN3, "tokenizer": {"train": True}}
STUDENT = {"config": TINY_STUDENT, "tokenizer": "teacher"}
FAILURE: FailureDict = {
    "time": 1.0,
    "rank": 0,
    "phase": "forward",
    "step": 2,
    "reason": "device_out_of_memory",
    "message": "CUDA out of memory.",
    "request_bytes": 2**30,
    "allocator": {"basis": "allocator", "allocated_bytes": 2**34},
}


@pytest.fixture
def client(desk: JobDriver) -> TestClient:
    """A client of the platform that plans jobs as the server does."""
    desk.platform.admission = Admission(
        desk.store, desk.platform.settings, sandboxes().calculations
    )
    desk.client = desk.platform.client()
    return desk.client


@pytest.fixture
def schemas(client: TestClient) -> SchemaCheck:
    return SchemaCheck(client.get("/openapi.json").json())


@pytest.mark.parametrize(
    ("method", "path", "names"),
    [
        ("post", "/jobs/plan", {"JobPlan", "ChainPlan"}),
        ("get", "/jobs/{job_id}", {"JobView"}),
        ("get", "/jobs/{job_id}/memory", {"JobMemory"}),
        ("post", "/diagnoses", {"Diagnosis"}),
    ],
)
def test_a_response_has_a_named_schema(
    schemas: SchemaCheck, method: str, path: str, names: set[str]
) -> None:
    assert schemas.names(schemas.response(method, path)) == names


def test_the_documents_of_a_job_have_named_schemas(schemas: SchemaCheck) -> None:
    fields = schemas.components["JobView"]["properties"]
    named = {field: schemas.names(fields[field]) for field in ("plan", "diagnosis", "progress")}
    assert named == {"plan": {"JobPlan"}, "diagnosis": {"Diagnosis"}, "progress": {"Progress"}}
    attempt = schemas.components["AttemptView"]["properties"]
    assert schemas.names(attempt["failure"]) == {"Failure"}
    assert not [name for name in schemas.components if "__" in name]  # two schemas of one name


def test_a_body_that_is_not_as_described_is_noticed(schemas: SchemaCheck) -> None:
    with pytest.raises(AssertionError, match="verdict"):
        schemas.check({}, {"$ref": "#/components/schemas/JobPlan"})


def _requests(desk: JobDriver) -> Iterator[dict[str, Any]]:
    yield desk.spec(model=TEACHER)
    yield desk.spec(model=TEACHER, resources={"device_memory": "1MiB"})  # does not fit
    job = desk.client.post("/jobs", json=desk.spec(model=TEACHER)).json()
    yield {**desk.distill(job_id=job["id"]), "student": STUDENT}
    yield {
        "kind": "chain",
        "teacher": {"dataset_id": desk.dataset_id, "model": TEACHER},
        "distill": {"student": STUDENT},
    }


def test_plans_are_as_described(desk: JobDriver, schemas: SchemaCheck) -> None:
    bodies = [desk.client.post("/jobs/plan", json=request) for request in _requests(desk)]
    assert [response.status_code for response in bodies] == [200] * 4
    for response in bodies:
        schemas.check(response.json(), schemas.response("post", "/jobs/plan"))
    assert bodies[1].json()["verdict"] == "does_not_fit"
    assert bodies[2].json()["teacher_placement"] in ("sharded", "replicated")
    assert set(bodies[3].json()) == {"teacher", "distill"}


def _out_of_memory(desk: JobDriver) -> str:
    """Return a job that ran out of memory, with everything that can be known of it."""
    claim = desk.running(desk.spec(model=TEACHER))
    desk.store.heartbeat(claim, phase=Phase.TRAINING, progress={"step": 2}, lease_seconds=60)
    run = RunDirectory(desk.platform.settings.run_dir(claim.job_id, claim.attempt))
    record = MemoryRecord(time=1.0, phase="wrap", allocated_bytes=5, peak_allocated_bytes=6)
    append_record(run.memory_file(0), record)
    desk.end(
        claim,
        Outcome(
            end=End.FAILED,
            reason=Reason.DEVICE_OUT_OF_MEMORY,
            message="Rank 0 ran out of memory.",
            diagnosis=diagnose(Case.from_dict(REPORTS[0]["case"])).to_dict(),
            measured={"0": {"wrap": 6}},
            observed={"0": {"basis": "allocator", "sharded_units": 3}},
            failure=FAILURE,
        ),
    )
    return claim.job_id


def test_a_job_and_its_memory_are_as_described(desk: JobDriver, schemas: SchemaCheck) -> None:
    job_id = _out_of_memory(desk)
    job = desk.client.get(f"/jobs/{job_id}").json()
    schemas.check(job, schemas.response("get", "/jobs/{job_id}"))
    assert job["attempts"][0]["failure"] == FAILURE
    memory = desk.client.get(f"/jobs/{job_id}/memory").json()
    schemas.check(memory, schemas.response("get", "/jobs/{job_id}/memory"))
    assert memory["planned_peak_bytes"] == job["plan"]["peak_bytes"]


def test_diagnoses_are_as_described(client: TestClient, schemas: SchemaCheck) -> None:
    schema = schemas.response("post", "/diagnoses")
    for report in REPORTS:
        schemas.check(client.post("/diagnoses", json=report["case"]).json(), schema)


def test_documents_of_an_older_version_are_passed_through(desk: JobDriver) -> None:
    claim = desk.running()
    plan, diagnosis = {"peak_bytes": 3, "former_field": 1}, {"cause": "no_longer_known"}
    outcome = Outcome(
        end=End.RETRY,
        reason=Reason.DEVICE_OUT_OF_MEMORY,
        plan=plan_document(**plan),
        diagnosis=diagnosis_document(**diagnosis),
        failure=cast("FailureDict", {"former_field": None}),
    )
    desk.end(claim, outcome)
    job = desk.client.get(f"/jobs/{claim.job_id}").json()
    assert (job["plan"], job["diagnosis"]) == (plan, diagnosis)
    assert job["attempts"][0]["failure"] == {"former_field": None}
