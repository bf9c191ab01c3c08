"""The trainer's worker: messages through a real Valkey, rows in a real Postgres, a real torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from services.shared.datasets.card import DatasetCard, Head, Split
from services.shared.jobs.db.store import Store, open_store
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.ids import new_id
from services.shared.jobs.outcome import Outcome
from services.shared.jobs.queue import make_celery, send
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import TeacherSpec
from services.shared.jobs.state import TERMINAL, JobState, Reason
from services.shared.jobs.views import Claim, EventType, FinishResult, JobView, QueuedJob
from services.shared.launch.aftermath.outcome import MemoryFailure
from services.shared.launch.processes import processes_with_mark
from services.shared.launch.task import run_job
from services.shared.launch.torchrun import Launch
from tests.factories import create_job, diagnosis_document

HERE = Path(__file__).parent
MODULE = "fake_training"
SECRET = "planted-secret-9d41c7"


@pytest.fixture
def settings(database_url: str, broker_url: str, data_dir: Path) -> JobSettings:
    return JobSettings(
        database_url=database_url,
        broker_url=broker_url,
        data_dir=data_dir,
        heartbeat_seconds=0.1,
        sweep_seconds=0.2,
    )


@pytest.fixture
def store(settings: JobSettings) -> Iterator[Store]:
    store = open_store(settings)
    yield store
    store.engine.dispose()


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank without torchrun, which takes seconds to import torch."""

    def plan(module: str, run_dir: Path, **_: object) -> Launch:
        command = [sys.executable, str(HERE / f"{module}.py"), str(run_dir)]
        return Launch(command=command, env=dict(os.environ), warnings=[])

    monkeypatch.setattr("services.shared.launch.task.plan_launch", plan)


@pytest.fixture(autouse=True)
def _fake_training_is_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


def _job(store: Store, behaviour: str, **fields: Any) -> JobView:
    head = Head(name="sentiment", labels=["negative", "positive"])
    card = DatasetCard(
        id=new_id("ds"),
        name="reviews",
        heads=[head],
        rows={Split.TRAIN: 8, Split.VALIDATION: 1, Split.TEST: 1},
        label_counts={head.name: {"negative": 5, "positive": 5}},
        missing_labels={head.name: 0},
        sha256="0" * 64,
    )
    directory = store.settings.dataset_dir(card.id)
    directory.mkdir(parents=True)
    (directory / "dataset.json").write_text(card.model_dump_json())
    store.add_dataset(card)
    spec = {
        "kind": "teacher",
        "name": behaviour,
        "dataset_id": card.id,
        "model": {"config": {"model_type": "qwen3"}, "tokenizer": {"train": True}},
        "resources": {"ranks": 1},
    }
    return create_job(store, TeacherSpec.model_validate(spec | fields))[0]


def _run(
    store: Store, job_id: str, *, stopping: Callable[[], bool] = lambda: False
) -> list[QueuedJob]:
    sent: list[QueuedJob] = []
    run_job(job_id, store=store, module=MODULE, worker="here", stopping=stopping, send=sent.append)
    return sent


def _until(condition: Callable[[], bool], *, seconds: float = 180) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_successful_job_registers_a_model_and_records_its_phases(
    store: Store, direct: None
) -> None:
    job = _job(store, "succeed")
    _run(store, job.id)
    job = store.job(job.id)
    assert (job.state, job.reason, job.worker) == (JobState.SUCCEEDED, None, None)
    assert job.metrics == {"heads": {"sentiment": {"macro_f1": 0.9, "accuracy": 0.9}}}
    assert job.model_id is not None
    assert (store.settings.model_dir(job.model_id) / "manifest.json").is_file()
    phases = [e.data["phase"] for e in store.events(job.id) if e.type == EventType.PHASE]
    assert phases == ["loading", "training", "evaluating"]
    assert EventType.EVALUATION in {event.type for event in store.events(job.id)}


def test_checkpoints_are_deleted_once_the_model_is_registered(store: Store, direct: None) -> None:
    job = _job(store, "succeed")
    _run(store, job.id)
    assert (store.settings.run_dir(job.id, 1) / "report.json").exists()
    assert not (store.settings.run_dir(job.id, 1) / "checkpoints").exists()


def test_a_redelivered_message_runs_the_job_once(store: Store, direct: None) -> None:
    job = _job(store, "succeed")
    _run(store, job.id)
    _run(store, job.id)
    assert len(store.attempts(job.id)) == 1


def test_success_without_an_artifact_is_a_failure(store: Store, direct: None) -> None:
    job = _job(store, "claim_success_without_an_artifact")
    _run(store, job.id)
    job = store.job(job.id)
    assert (job.state, job.reason, job.model_id) == (JobState.FAILED, Reason.CRASHED, None)


def test_a_killed_rank_is_named(store: Store) -> None:
    job = _job(store, "be_killed", max_attempts=1)
    _run(store, job.id)
    (attempt,) = store.attempts(job.id)
    assert (attempt.reason, attempt.failed_rank) == (Reason.CRASHED, 0)
    assert "SIGKILL" in str(attempt.message)


def test_a_rank_killed_by_the_kernel_is_distinguished_from_any_other_kill(
    store: Store, small_cgroup: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_CGROUP", str(small_cgroup))
    job = _job(store, "exhaust_host_memory", max_attempts=1)
    run = store.settings.run_dir(job.id, 1)
    seen: list[int] = []

    def release_after_three_checks() -> bool:
        seen.extend([1] if (run / "in_cgroup").exists() else [])
        if len(seen) == 3:  # heartbeats read the cgroup more often than this is called
            (run / "go").touch()
        return False

    _run(store, job.id, stopping=release_after_three_checks)
    job = store.job(job.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.HOST_OUT_OF_MEMORY)
    assert store.attempts(job.id)[0].failed_rank == 0
    assert job.diagnosis is not None
    assert job.diagnosis["cause"] == "host_memory"


def test_a_fault_of_the_worker_itself_fails_the_job_and_is_reported(
    store: Store, direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def determine_outcome(*args: object, **kwargs: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("services.shared.launch.task.determine_outcome", determine_outcome)
    job = _job(store, "succeed")
    _run(store, job.id)
    job = store.job(job.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.CRASHED)
    assert "The worker itself failed" in str(job.message)


def test_a_cancelled_job_saves_a_checkpoint_and_ends(store: Store, direct: None) -> None:
    job = _job(store, "stop_when_asked")

    def cancel_once_it_trains() -> bool:
        if store.job(job.id).phase == "training":
            store.request_cancel(job.id)
        return False

    _run(store, job.id, stopping=cancel_once_it_trains)
    assert store.job(job.id).state is JobState.CANCELLED
    assert (store.settings.run_dir(job.id, 1) / "checkpoints" / "step-1").is_dir()


def test_a_job_handed_back_is_sent_again_and_uses_no_attempt(store: Store, direct: None) -> None:
    job = _job(store, "stop_when_asked", max_attempts=1)
    sent = _run(store, job.id, stopping=lambda: store.job(job.id).phase == "training")
    assert sent == [QueuedJob(job.id, "teacher")]
    assert store.job(job.id).state is JobState.QUEUED
    again = store.claim(job.id, worker="next", lease_seconds=60)
    assert again is not None


def test_a_job_with_automatic_retry_runs_again_with_the_remedy_that_fits(
    store: Store, direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = MemoryFailure(diagnosis_document(cause="capacity"), {"optimizer_in_backward": True})
    monkeypatch.setattr("services.shared.launch.task.examine_memory", lambda *a, **k: remedy)
    job = _job(store, "run_out_of_memory_once", on_out_of_memory="retry")
    assert _run(store, job.id) == [QueuedJob(job.id, "teacher")]
    _run(store, job.id)
    assert store.job(job.id).state is JobState.SUCCEEDED
    recipes = [attempt.recipe["optimizer_in_backward"] for attempt in store.attempts(job.id)]
    assert recipes == [False, True]


def test_a_result_whose_lease_was_lost_is_discarded(
    store: Store, direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job(store, "succeed")
    finish = store.finish

    def finish_too_late(claim: Claim, outcome: Outcome) -> FinishResult:
        store.end_lost_attempts(now=store.job(job.id).created_at.replace(year=2999))
        return finish(claim, outcome)

    monkeypatch.setattr(store, "finish", finish_too_late)
    _run(store, job.id)
    assert store.job(job.id).state is JobState.QUEUED
    models = store.settings.models_dir
    assert not models.exists() or list(models.iterdir()) == []


def test_a_result_waits_for_an_unavailable_database(
    store: Store, direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = _job(store, "succeed")
    finish, away = store.finish, [Unavailable("away")]
    monkeypatch.setattr("services.shared.launch.task._FIRST_PAUSE_SECONDS", 0.01)

    def finish_at_the_second_try(claim: Claim, outcome: Outcome) -> FinishResult:
        if away:
            raise away.pop()
        return finish(claim, outcome)

    monkeypatch.setattr(store, "finish", finish_at_the_second_try)
    _run(store, job.id)
    assert store.job(job.id).state is JobState.SUCCEEDED


def test_a_full_disk_has_its_own_reason(
    store: Store, direct: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("services.shared.launch.task.prepare", prepare)
    job = _job(store, "succeed")
    _run(store, job.id)
    job = store.job(job.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.DISK_FULL)


@pytest.fixture
def worker(settings: JobSettings, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process that listens to the queue `trainer` and runs the fake training."""
    ready = tmp_path / "ready"
    env = dict(os.environ) | {
        # The fake training, and this checkout where another one is installed.
        "PYTHONPATH": f"{HERE}:{HERE.parents[1]}",
        "STILLHOUSE_READY_FILE": str(ready),
        "STILLHOUSE_DATABASE_URL": settings.database_url.replace("@", f":{SECRET}@", 1),
        "STILLHOUSE_BROKER_URL": settings.broker_url,
        "STILLHOUSE_DATA_DIR": str(settings.data_dir),
        "STILLHOUSE_HEARTBEAT_SECONDS": "0.1",
        "STILLHOUSE_SWEEP_SECONDS": "0.2",
        "STILLHOUSE_API_KEY": SECRET,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "HTTPS_PROXY": f"http://somebody:{SECRET}@127.0.0.1:9",
    }
    code = f"from services.shared.launch.worker import serve; serve('trainer', module='{MODULE}')"
    with (tmp_path / "worker.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code], env=env, stdout=log, stderr=subprocess.STDOUT
        )
    assert _until(ready.exists), (tmp_path / "worker.log").read_text()
    yield process
    process.kill()
    process.wait()


def test_a_message_makes_the_worker_run_the_job(
    worker: subprocess.Popen[bytes], store: Store, settings: JobSettings
) -> None:
    job = _job(store, "succeed")
    send(make_celery(settings), job.id, "teacher")
    assert _until(lambda: store.job(job.id).state in TERMINAL)
    assert store.job(job.id).state is JobState.SUCCEEDED
    # A supervisor never loads torch: 300 MiB and seconds in a process that only waits.
    assert "libtorch" not in Path(f"/proc/{worker.pid}/maps").read_text()


def test_a_terminated_worker_hands_its_job_back_and_exits(
    worker: subprocess.Popen[bytes], store: Store, settings: JobSettings
) -> None:
    job = _job(store, "stop_when_asked")
    send(make_celery(settings), job.id, "teacher")
    assert _until(lambda: store.job(job.id).phase == "training")
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    assert store.job(job.id).state is JobState.QUEUED
    (attempt,) = store.attempts(job.id)
    assert attempt.ending == "handed_back"


def test_no_secret_of_a_worker_reaches_process_lists_ranks_logs_or_run_directories(
    worker: subprocess.Popen[bytes], store: Store, settings: JobSettings, tmp_path: Path
) -> None:
    job = _job(store, "stop_when_asked")
    send(make_celery(settings), job.id, "teacher")
    assert _until(lambda: store.job(job.id).phase == "training")
    ranks = [process.pid for process in processes_with_mark(str(settings.run_dir(job.id, 1)))]
    assert len(ranks) >= 2  # torchrun and a rank
    held = [Path(f"/proc/{pid}/environ") for pid in ranks]
    assert not _holders(SECRET, [*held, *Path("/proc").glob("[0-9]*/cmdline")])
    # The search finds it where it is.
    assert _holders(SECRET, [Path(f"/proc/{worker.pid}/environ")])

    worker.send_signal(signal.SIGTERM)
    assert worker.wait(60) == 0
    files = [path for path in settings.data_dir.rglob("*") if path.is_file()]
    assert any(path.name == "spec.json" for path in files)
    assert not _holders(SECRET, [*files, tmp_path / "worker.log"])


def _holders(text: str, files: list[Path]) -> list[Path]:
    """Return the files that hold a text; processes end and files go meanwhile."""
    found = []
    for file in files:
        try:
            content = file.read_bytes()
        except OSError:
            continue
        if text.encode() in content:
            found.append(file)
    return found


def test_a_job_whose_worker_was_killed_is_resumed_by_another(
    worker: subprocess.Popen[bytes], store: Store, direct: None, settings: JobSettings
) -> None:
    job = _job(store, "stop_when_asked")
    send(make_celery(settings), job.id, "teacher")
    assert _until(lambda: store.job(job.id).phase == "training")
    worker.kill()
    worker.wait()
    later = store.job(job.id).created_at.replace(year=2999)
    assert store.end_lost_attempts(now=later) == [QueuedJob(job.id, "teacher")]
    stop = threading.Event()
    taken = threading.Thread(target=_run, args=(store, job.id), kwargs={"stopping": stop.is_set})
    taken.start()
    assert _until(lambda: store.job(job.id).phase == "training")
    assert store.job(job.id).attempt == 2
    stop.set()
    taken.join()
