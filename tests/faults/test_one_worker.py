"""Faults of one worker without torch: lost replies, network failures, killed ranks, redelivery."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from services.shared.jobs.db.store import Store
from services.shared.jobs.run_directory import ProgressRecord, RunDirectory, read_records
from services.shared.jobs.state import JobState, Reason
from services.shared.jobs.views import QueuedJob
from tests.faults.invariants import check_job
from tests.faults.proxy import PostgresProxy

Submit = Callable[..., str]
Work = Callable[..., list[QueuedJob]]


@pytest.mark.parametrize("statement_to_lose", [b"INSERT INTO attempts", b"UPDATE attempts"])
def test_a_commit_whose_reply_is_lost_takes_effect_once(
    store: Store, proxy: PostgresProxy, submit: Submit, work: Work, statement_to_lose: bytes
) -> None:
    job_id = submit("calm")
    proxy.lose_commit_reply(statement_to_lose)
    work(job_id)
    assert proxy.lost_replies == 1
    job = store.job(job_id)
    assert (job.state, job.attempt) == (JobState.SUCCEEDED, 1)
    assert check_job(store, job_id).violations == []


def test_a_job_continues_through_a_network_failure(
    store: Store, proxy: PostgresProxy, submit: Submit, work: Work
) -> None:
    job_id = submit("calm")
    healer = threading.Timer(1.0, proxy.heal)

    def cut_once() -> bool:  # called while the rank runs, which takes less than a second
        if not healer.is_alive() and not healer.finished.is_set():
            proxy.cut()
            healer.start()
        return False

    work(job_id, stopping=cut_once)
    healer.join()
    assert store.job(job_id).state is JobState.SUCCEEDED
    assert check_job(store, job_id).violations == []


@pytest.mark.parametrize(
    ("name", "begun"), [("killed_after_1", 0), ("killed_after_5", 4), ("killed_in_export", 6)]
)
def test_a_killed_rank_costs_an_attempt_and_the_progress_since_the_checkpoint(
    store: Store, submit: Submit, work: Work, name: str, begun: int
) -> None:
    job_id = submit(name)
    assert work(job_id) == [QueuedJob(job_id, "teacher")]
    work(job_id)
    job = store.job(job_id)
    assert [attempt.ending for attempt in job.attempts] == ["retry", "succeeded"]
    run = RunDirectory(store.settings.run_dir(job_id, 2))
    steps = [record.step for _, record in read_records(run.progress, ProgressRecord) if record.step]
    assert min(steps) == max(begun, 1)
    found = check_job(store, job_id)
    assert found.violations == []
    assert (found.resumed, found.restarted) == (int(begun > 0), int(begun == 0))


def test_a_job_whose_ranks_are_killed_in_every_attempt_fails_as_crashed(
    store: Store, submit: Submit, work: Work
) -> None:
    job_id = submit("killed_after_1", max_attempts=1)
    assert work(job_id) == []
    assert store.job(job_id).reason is Reason.CRASHED
    assert check_job(store, job_id).violations == []


def test_a_message_delivered_three_times_runs_one_attempt(
    store: Store, submit: Submit, work: Work
) -> None:
    job_id = submit("calm")
    for _ in range(3):
        work(job_id)
    assert store.job(job_id).attempt == 1
    assert check_job(store, job_id).violations == []
