"""Real failures of real ranks, from the claim to what `GET /jobs/{id}` returns."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from services.api.admission import Admission
from services.api.app import create_app
from services.api.auth.keys import Keys
from services.api.deps import AppContext
from services.api.settings import ApiSettings
from services.api.telemetry import Metrics
from services.shared.datasets.ingest import ingest
from services.shared.datasets.upload import Format, HeadColumn, Layout
from services.shared.jobs.db.store import Store, open_store
from services.shared.jobs.ids import new_id
from services.shared.jobs.planning.spec_to_plan import plan_resolved
from services.shared.jobs.run_directory import ProgressRecord, RunDirectory, read_records
from services.shared.jobs.spec import TeacherSpec
from services.shared.jobs.state import JobState, Reason
from services.shared.jobs.views import JobView, QueuedJob
from services.shared.launch import supervise
from services.shared.launch.oom_counter import OomCounters
from services.shared.launch.task import run_job
from services.shared.memory.recipe import Engine
from services.shared.training.sharding.shard import default_engine
from tests.api.fakes import FakePredictor
from tests.conftest import make_cgroup, remove_cgroup
from tests.sandboxes import sandboxes

HERE = Path(__file__).parent
MIB = 2**20
# Narrow but for its MLP, whose activations outweigh all else. They are above 32 MiB: malloc maps such
# blocks one by one, so that address space counts them exactly.
HIDDEN, INTERMEDIATE, LAYERS, TOKENS = 32, 5632, 3, 2048
FSDP2 = default_engine() is Engine.FSDP2
MLP_BYTES = TOKENS * INTERMEDIATE * 4  # one float32 [tokens, intermediate]
MODEL = {
    "config": {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "tokenizer": {"train": True, "vocab_size": 400},
}
TRAINING = {
    "max_steps": 2,
    "checkpoint_every_steps": 1,
    "batch_size": 16,
    "max_length": 256,
    "micro_batch_tokens": TOKENS,
    "learning_rate": 1e-3,
}
RECIPE = {"compute": "float32", "reduce": "float32", "activation_checkpointing": False}


@pytest.fixture
def settings(database_url: str, data_dir: Path) -> ApiSettings:
    return ApiSettings(
        database_url=database_url,
        broker_url="redis://nowhere",
        data_dir=data_dir,
        heartbeat_seconds=0.2,
    )


@pytest.fixture
def store(settings: ApiSettings) -> Iterator[Store]:
    store = open_store(settings)
    yield store
    store.engine.dispose()


@pytest.fixture(autouse=True)
def _failing_ranks_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(
        "MALLOC_ARENA_MAX", "1"
    )  # further arenas reserve address space that they do not use


@pytest.fixture
def client(settings: ApiSettings, store: Store) -> TestClient:
    """The API with real admission; no model is served and no message is sent."""
    context = AppContext(
        settings=settings,
        store=store,
        send=lambda *_: True,
        predictor=FakePredictor(),
        admission=Admission(store, settings, sandboxes().calculations),
        keys=Keys({}),
        metrics=Metrics(),
        sandboxes=sandboxes(),
    )
    return TestClient(create_app(context), base_url="http://127.0.0.1:8000")


@pytest.fixture
def kernel_kill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A memory cgroup for rank 1, or where that is impossible a counter that rank 1 increments itself."""
    made = make_cgroup()
    if made is None:
        counter = tmp_path / "proc" / "vmstat"
        counter.parent.mkdir()
        counter.write_text("oom_kill 0\n")
        monkeypatch.setenv("TEST_COUNTER", str(counter))
        monkeypatch.setattr(supervise, "OomCounters", partial(OomCounters, root=tmp_path))
        yield
        return
    monkeypatch.setenv("TEST_CGROUP", str(made))
    yield
    remove_cgroup(made)


def rows() -> Iterator[dict[str, str]]:
    """Texts longer than `max_length`, so that every micro-batch is as large as the plan says."""
    draw = random.Random(7)
    for number in range(80):
        label = draw.choice(["good", "bad"])
        words = {"good": ["great", "clean", "kind"], "bad": ["dirty", "rude", "slow"]}[label]
        yield {"text": f"{number} " + " ".join(draw.choices(words, k=300)), "label": label}


@pytest.fixture
def dataset(store: Store, tmp_path: Path) -> str:
    upload = tmp_path / "texts.jsonl"
    upload.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    card = ingest(
        upload,
        format=Format.JSONL,
        layout=Layout(heads=[HeadColumn(name="label")]),
        id=new_id("ds"),
        name="texts",
        datasets_dir=store.settings.datasets_dir,
    )
    store.add_dataset(card)
    return card.id


def spec(fault: str, dataset: str, **more: Any) -> dict[str, Any]:
    return {
        "kind": "teacher",
        "name": fault,
        "dataset_id": dataset,
        "model": MODEL,
        "training": TRAINING,
        "recipe": RECIPE,
        "resources": {"ranks": 2, "device": "cpu", "device_memory": "1400MiB"},
        "max_attempts": 2,
    } | more


def run(store: Store, job_id: str) -> list[QueuedJob]:
    """Do what a worker does with one message."""
    sent: list[QueuedJob] = []
    run_job(
        job_id,
        store=store,
        module="failing_ranks",
        worker="here",
        stopping=lambda: False,
        send=sent.append,
    )
    return sent


def submit(store: Store, fault: str, dataset: str, **more: Any) -> JobView:
    teacher_spec = TeacherSpec.model_validate(spec(fault, dataset, **more))
    return store.create_job(plan_resolved(store.resolve(teacher_spec), store.settings))[0]


def test_a_failed_allocation_is_attributed_to_its_tensor_and_the_remedy_works(
    client: TestClient, store: Store, dataset: str
) -> None:
    job = client.post("/jobs", json=spec("exceed_the_address_space", dataset)).json()
    run(store, job["id"])
    job = client.get(f"/jobs/{job['id']}").json()
    # A CPU allocates from the host: there is no device that could run out of memory.
    assert (job["state"], job["reason"]) == ("failed", "host_out_of_memory")
    found = job["diagnosis"]
    assert (found["cause"], found["sharded"]) == ("host_memory", "yes")
    assert found["message"]["requested_bytes"] == MLP_BYTES
    named = {key: found["request"][0][key] for key in ("what", "bytes", "dtype", "match")}
    assert named == {
        "what": "MLP activation of 2,048 tokens",
        "bytes": MLP_BYTES,
        "dtype": "float32",
        "match": "exact",
    }
    failure = job["attempts"][0]["failure"]
    assert (failure["phase"], failure["step"], failure["request_bytes"]) == (
        "forward",
        2,
        MLP_BYTES,
    )
    # The CPU allocator has no counters; those of the kernel for the rank are reported instead.
    held = failure["allocator"]
    assert held["basis"] == "process"
    assert 0 <= held["address_space_limit_bytes"] - held["address_space_bytes"] < 450 * MIB

    remedy = next(r for r in found["remedies"] if r["verdict"] == "fits")
    again = client.post(f"/jobs/{job['id']}/retry", json={"changes": remedy["changes"]})
    assert again.status_code == 202, again.text
    run(store, again.json()["id"])
    retried = client.get(again.headers["Location"]).json()
    assert retried["state"] == "succeeded", retried["message"]
    assert retried["spec"]["training"] == job["spec"]["training"]
    assert retried["plan"]["peak_bytes"] < job["plan"]["peak_bytes"]
    assert steps(store, retried["id"], 1) == [2]

    series = client.get(f"/jobs/{retried['id']}/memory").json()
    for rank in ("0", "1"):
        memory = retried["memory"][rank]
        assert "no activations" in memory["basis"]
        assert memory["phases"] == series["ranks"][int(rank)]["phases"]
        wrapped, forward = memory["phases"]["wrap"], memory["phases"]["forward"]
        assert wrapped["comparable"] == FSDP2
        if FSDP2:
            assert wrapped["measured_bytes"] == pytest.approx(wrapped["planned_bytes"], rel=0.02)
        assert not forward["comparable"]
        assert forward["planned_bytes"] == retried["plan"]["phases"]["forward"]
    ratio = r'stillhouse_plan_error_ratio{device="cpu",phase="wrap",statistic="worst"} -0.0'
    assert (ratio in client.get("/metrics").text) == FSDP2


def test_a_rank_killed_by_the_kernel_is_reported_with_its_reason(
    store: Store, dataset: str, kernel_kill: None
) -> None:
    job = submit(store, "be_killed_by_the_kernel", dataset)
    run(store, job.id)
    job, (attempt,) = store.job(job.id), store.attempts(job.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.HOST_OUT_OF_MEMORY)
    assert (attempt.failed_rank, attempt.reason) == (1, Reason.HOST_OUT_OF_MEMORY)
    assert "rank 1" in str(job.message)
    assert job.diagnosis is not None
    assert job.diagnosis["cause"] == "host_memory"


def test_ranks_that_hold_the_whole_model_are_stopped_before_the_first_step(
    store: Store, dataset: str
) -> None:
    job = submit(store, "leave_parameters_whole", dataset)
    run(store, job.id)
    job = store.job(job.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.NOT_SHARDED)
    assert steps(store, job.id, 1) == []
    assert job.observed is not None
    assert set(job.observed) == {"0", "1"}
    for seen in job.observed.values():
        units = LAYERS + 2  # the embedding, the layers, the root
        formed = {"fsdp1": units, "fsdp2": 0}[seen["engine"]]
        assert (seen["sharded_units"], seen["expected_units"]) == (formed, units)
        assert seen["local_parameter_bytes"] == seen["whole_model_bytes"] == seen["allocated_bytes"]
        assert seen["expected_local_parameter_bytes"] <= seen["whole_model_bytes"] / 2 + 4096
    failed = store.settings.run_dir(job.id, 1) / "ranks"
    assert {read(failed / str(rank))["reason"] for rank in (0, 1)} == {"not_sharded"}
    assert job.diagnosis is not None
    assert (job.diagnosis["cause"], job.diagnosis["sharded"]) == ("not_sharded", "no")


def test_the_root_cause_is_the_rank_that_failed_not_those_that_waited_for_it(
    store: Store, dataset: str
) -> None:
    job = submit(store, "fail_alone", dataset, timeout_seconds=240)
    run(store, job.id)
    job, (attempt,) = store.job(job.id), store.attempts(job.id)
    echo, cause = (read(store.settings.run_dir(job.id, 1) / f"ranks/{rank}") for rank in (0, 1))
    assert (echo["reason"], cause["reason"]) == ("collective_timeout", "host_out_of_memory")
    assert (attempt.failed_rank, job.reason) == (1, Reason.HOST_OUT_OF_MEMORY)
    assert job.state is JobState.FAILED
    assert job.diagnosis is not None
    assert job.diagnosis["message"] is not None
    assert job.diagnosis["message"]["requested_bytes"] == 2**50


def test_a_job_with_automatic_retry_resumes_from_its_checkpoint_with_the_remedy(
    store: Store, dataset: str
) -> None:
    job = submit(store, "exceed_the_address_space", dataset, on_out_of_memory="retry")
    assert run(store, job.id) == [QueuedJob(job.id, "teacher")]
    assert store.job(job.id).state is JobState.QUEUED
    run(store, job.id)
    job, (first, second) = store.job(job.id), store.attempts(job.id)
    assert (job.state, job.reason) == (JobState.SUCCEEDED, None)
    assert (first.ending, second.ending) == ("retry", "succeeded")
    assert first.reason is Reason.HOST_OUT_OF_MEMORY
    assert first.diagnosis is not None
    assert first.plan is not None
    assert second.plan is not None
    assert first.plan["peak_bytes"] > second.plan["peak_bytes"]
    assert (first.plan["verdict"], second.plan["verdict"]) == ("tight", "fits")
    for attempt in (first, second):
        run_dir = RunDirectory(store.settings.run_dir(job.id, attempt.number))
        assert json.loads(run_dir.plan.read_text()) == attempt.plan
        assert json.loads(run_dir.spec.read_text())["spec"]["training"]["batch_size"] == 16
    assert job.plan == second.plan
    changed = {name for name in first.recipe if first.recipe[name] != second.recipe[name]}
    assert changed == {"activation_checkpointing"}
    assert steps(store, job.id, 1) == [1]
    assert steps(store, job.id, 2) == [2]


def steps(store: Store, job_id: str, attempt: int) -> list[int]:
    """Return the steps that an attempt finished."""
    file = RunDirectory(store.settings.run_dir(job_id, attempt)).progress
    records = [record for _, record in read_records(file, ProgressRecord)]
    return [r.step for r in records if r.step and r.loss is not None]


def read(rank_dir: Path) -> dict[str, Any]:
    """Return the failure file of a rank."""
    failure: dict[str, Any] = json.loads((rank_dir / "failure.json").read_text())
    return failure
