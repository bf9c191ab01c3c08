"""Plans and diagnoses are calculated in a sandbox, whose refusals are problem documents."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from services.api.sandboxes import Sandboxes
from services.shared.datasets.card import Head, HeadType
from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.planning.calculations import (
    PlanRequest,
    answer_plan,
    planned_spec,
)
from services.shared.jobs.planning.spec_to_plan import plan_resolved
from services.shared.jobs.resolved_spec import ResolvedSpec
from services.shared.jobs.spec import TeacherSpec
from services.shared.sandbox.limits import Limits
from services.shared.sandbox.sandbox import Sandbox
from tests.api.harness import Platform
from tests.sandboxes import sandboxes

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 100,
}


def resolved(**fields: object) -> ResolvedSpec:
    model = {"config": CONFIG, "tokenizer": {"train": True}}
    spec = {"kind": "teacher", "dataset_id": "ds_1", "model": model, **fields}
    head = Head(name="mood", type=HeadType.SINGLE_LABEL, labels=["a", "b"])
    return ResolvedSpec(
        TeacherSpec.model_validate(spec), heads=(head,), dataset_dir=Path("/nowhere")
    )


def with_limits(platform: Platform, **limits: float) -> Platform:
    values = {"seconds": 10, "wall_seconds": 60, "memory_bytes": 2**30} | limits
    shared = sandboxes()
    calculations = Sandbox(shared.calculations.server, limits=Limits(**values))  # type: ignore[arg-type]
    platform.sandboxes = Sandboxes(calculations, shared.validations)
    return platform


def test_a_calculation_over_its_limit_is_refused_with_a_sentence(offline: Platform) -> None:
    client = with_limits(offline, memory_bytes=56 * 2**20).client()
    response = client.post("/diagnoses", json={"log": "CUDA out of memory. " * 200_000})
    assert response.status_code == 422
    assert response.json()["type"] == "urn:stillhouse:problem:invalid-request"
    assert "needs more than 58,720,256 bytes of memory" in response.json()["detail"]


def test_a_busy_server_answers_503_with_retry_after(offline: Platform) -> None:
    client = with_limits(offline, wall_seconds=0.001).client()
    response = client.post("/diagnoses", json={"log": "CUDA out of memory. " * 20_000})
    assert response.status_code == 503
    assert response.json()["type"] == "urn:stillhouse:problem:unavailable"
    assert response.headers["retry-after"] == "5"


def test_diagnoses_do_not_delay_other_requests(offline: Platform) -> None:
    with offline.client() as client:
        log = {"log": "".join(f"line {n}: CUDA out of memory\n" for n in range(20_000))}
        threads = [
            threading.Thread(target=lambda: client.post("/diagnoses", json=log)) for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        worst = 0.0
        while any(thread.is_alive() for thread in threads):
            started = time.perf_counter()
            assert client.get("/livez").status_code == 200
            worst = max(worst, time.perf_counter() - started)
        assert worst < 5  # in threads of one process took longer than that


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"resources": {"ranks": 8, "device": "k100_ai"}, "recipe": "auto"},
        {"training": {"epochs": 3, "learning_rate": 1e-5}, "recipe": {"optimizer": "adafactor"}},
    ],
)
def test_a_plan_of_a_sandbox_equals_one_outside(fields: dict[str, object], tmp_path: Path) -> None:
    job = resolved(**fields)
    request = PlanRequest(job, host_memory="64GiB", engine="fsdp2", processors_dir=tmp_path)
    adapter = TypeAdapter(ResolvedSpec)
    assert adapter.validate_json(adapter.dump_json(job)) == job
    answer = sandboxes().calculations.run(answer_plan, request)
    assert planned_spec(job, answer) == plan_resolved(job, request)


def test_a_refusal_of_a_sandbox_equals_one_outside(tmp_path: Path) -> None:
    job = resolved(resources={"ranks": 1024, "device": "k100_ai"})
    request = PlanRequest(job, host_memory=None, engine="fsdp2", processors_dir=tmp_path)
    with pytest.raises(InvalidRequest) as outside:
        plan_resolved(job, request)
    with pytest.raises(InvalidRequest) as inside:
        planned_spec(job, sandboxes().calculations.run(answer_plan, request))
    assert (str(inside.value), inside.value.field) == (str(outside.value), outside.value.field)
