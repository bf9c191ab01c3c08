"""Seeds a platform before fuzzing: a dataset, jobs in several states, a serving student."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from services.shared.jobs.db.store import Store, open_store
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.run_directory import ProgressRecord, Report, RunDirectory, append_record
from services.shared.jobs.state import Phase, Reason
from services.shared.jobs.views import Claim
from tests.api.serving.artifacts import write_artifact
from tests.api.serving.fakes import HEADS
from tests.fuzz.api_alone import ApiAlone
from tests.fuzz.small_model import SMALL_MODEL

_SERVES_SECONDS = 120.0


@dataclass(frozen=True)
class Seeds:
    """Ids that requests may use."""

    dataset_id: str
    job_ids: list[str]
    model_id: str


def seed(api: ApiAlone) -> Seeds:
    """Fill a fresh platform over HTTP, as a user and as a worker would; wait until it serves."""
    store = open_store(api.settings)
    with api.client() as client:
        dataset_id = _dataset(client)
        jobs = [_job(client, dataset_id) for _ in range(4)]
        failed, succeeded, running, _queued = jobs
        _fail(store, failed)
        model_id = _succeed(store, succeeded, api.settings.data_dir / "artifact")
        _run(store, running)
        _done(client.post(f"/models/{model_id}/promote"))
        deadline = time.monotonic() + _SERVES_SECONDS
        while not client.get("/health").json()["models"]:
            if time.monotonic() > deadline:
                raise RuntimeError(f"The student never served ({api.log}).")
            time.sleep(0.2)
    store.engine.dispose()
    return Seeds(dataset_id, jobs, model_id)


def _done(response: httpx.Response) -> dict[str, Any]:
    assert response.is_success, response.text
    found: dict[str, Any] = response.json()
    return found


def _dataset(client: httpx.Client) -> str:
    rows = [{"text": f"text {n}", "tone": ("bad", "good")[n % 2]} for n in range(60)]
    content = "\n".join(json.dumps(row) for row in rows)
    form = {"heads": '[{"name": "tone"}]'}
    files = {"file": ("tones.jsonl", content.encode())}
    return str(_done(client.post("/datasets", files=files, data=form))["id"])


def _job(client: httpx.Client, dataset_id: str) -> str:
    body = {"kind": "teacher", "dataset_id": dataset_id, "model": SMALL_MODEL}
    return str(_done(client.post("/jobs", json=body))["id"])


def _claim(store: Store, job_id: str) -> Claim:
    claim = store.claim(job_id, worker="seed", lease_seconds=3600)
    assert claim is not None
    return claim


def _run(store: Store, job_id: str) -> Claim:
    claim = _claim(store, job_id)
    run = RunDirectory(store.settings.run_dir(job_id, claim.attempt))
    run.path.mkdir(parents=True)
    run.log.write_text("".join(f"line {n}\n" for n in range(200)))
    for step in range(50):
        record = ProgressRecord(time=1.7e9 + step, phase=Phase.TRAINING, step=step)
        append_record(run.progress, record)
    store.heartbeat(claim, phase=Phase.TRAINING, progress={"step": 49}, lease_seconds=3600)
    return claim


def _fail(store: Store, job_id: str) -> None:
    message = "CUDA out of memory. Tried to allocate 250.00 MiB"
    outcome = Outcome(end=End.FAILED, reason=Reason.DEVICE_OUT_OF_MEMORY, message=message)
    assert store.finish(_run(store, job_id), outcome).applied


def _succeed(store: Store, job_id: str, aside: Path) -> str:
    claim = _run(store, job_id)
    artifact = store.settings.model_dir(claim.model_id)
    write_artifact(aside, "qwen3").rename(artifact)
    report = Report(
        outcome="succeeded",
        heads=[head.model_dump(mode="json") for head in HEADS],
        parameters=1000,
        size_bytes=4000,
        evaluation={"heads": {"tone": {"macro_f1": 0.9}}},
    )
    assert store.finish(claim, Outcome(end=End.SUCCEEDED, report=report)).applied
    return claim.model_id
