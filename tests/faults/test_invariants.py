"""The check of invariants detects violations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.shared.jobs.db.store import Store
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.views import QueuedJob
from tests.faults.invariants import check_job


def rewrite(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))


def damage(store: Store, job_id: str) -> None:
    (store.model(job_id).path / "weights").write_bytes(b"other")


def remove(store: Store, job_id: str) -> None:
    shutil.rmtree(store.model(job_id).path)


def begin_at_the_start(store: Store, job_id: str) -> None:
    path = RunDirectory(store.settings.run_dir(job_id, 2)).progress
    rewrite(path, lambda line: line | {"step": 0} if line["phase"] == "training" else line)


def skip_ahead(store: Store, job_id: str) -> None:
    path = RunDirectory(store.settings.run_dir(job_id, 2)).progress
    rewrite(path, lambda line: line | {"step": 6} if line.get("step") == 4 else line)


def start_twice(store: Store, job_id: str) -> None:
    with store.engine.begin() as connection:
        connection.exec_driver_sql(
            "INSERT INTO events (job_id, attempt, type, data) "
            "SELECT job_id, attempt, type, data FROM events WHERE data->>'state' = 'succeeded'"
        )


def succeed_twice(store: Store, job_id: str) -> None:
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE attempts SET ending = 'succeeded'")


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (damage, "weights of the artifact is damaged"),
        (remove, "is not there"),
        (begin_at_the_start, "began after step 0, with a checkpoint of step 4"),
        (skip_ahead, "began after step 6"),
        (start_twice, "ended not once"),
        (succeed_twice, "not exactly the last attempt succeeded"),
    ],
)
def test_a_violation_is_detected(
    store: Store,
    submit: Callable[..., str],
    work: Callable[..., list[QueuedJob]],
    tamper: Callable[[Store, str], None],
    message: str,
) -> None:
    job_id = submit("killed_after_5")
    work(job_id)
    work(job_id)
    assert check_job(store, job_id).violations == []
    tamper(store, job_id)
    assert any(message in found for found in check_job(store, job_id).violations)


def test_a_job_that_fails_before_its_last_attempt_is_detected(
    store: Store, submit: Callable[..., str], work: Callable[..., list[QueuedJob]]
) -> None:
    job_id = submit("killed_after_1", max_attempts=1)
    work(job_id)
    with store.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE jobs SET max_attempts = 3")
    (found,) = check_job(store, job_id).violations
    assert "given up as crashed after 1 of 3 attempts" in found
