"""The sweep on real Postgres and Valkey: nothing lost, nothing sent without end."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from celery import Celery

from services.shared.jobs.db.attempt_queries import MAX_FREE_LOSSES
from services.shared.jobs.queue import depth, make_celery
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.state import JobState, Reason
from services.shared.jobs.sweep import sweep

if TYPE_CHECKING:
    from tests.jobs.conftest import AtOnce, StoreDriver

MINUTE = timedelta(minutes=1)


@pytest.fixture
def app(broker_url: str, data_dir: Path) -> Celery:
    return make_celery(
        JobSettings(database_url="postgresql://unused", broker_url=broker_url, data_dir=data_dir)
    )


@pytest.fixture
def later() -> Callable[[int], datetime]:
    """Moments that many minutes from now."""
    return lambda minutes: datetime.now(timezone.utc) + minutes * MINUTE


def test_a_job_whose_lease_expired_is_queued_again(
    driver: StoreDriver, app: Celery, later: Callable[[int], datetime]
) -> None:
    claim = driver.running()
    assert sweep(driver.store, app) == []
    assert sweep(driver.store, app, now=later(2)) == [(claim.job_id, "teacher")]
    job = driver.store.job(claim.job_id)
    assert (job.state, job.reason) == (JobState.QUEUED, None)
    assert depth(app, "teacher") == 1
    (attempt,) = driver.store.attempts(claim.job_id)
    assert (attempt.ending, attempt.reason) == ("lost", Reason.LOST)
    assert (
        attempt.message
        == "Worker worker-1 sent no heartbeat during attempt 1 until its lease expired."
    )


def test_losses_use_up_no_attempts(
    driver: StoreDriver, app: Celery, later: Callable[[int], datetime]
) -> None:
    """A machine that sleeps three times must not fail its job."""
    claim = driver.running(max_attempts=1)
    for _ in range(3):
        assert sweep(driver.store, app, now=later(2)) == [(claim.job_id, "teacher")]
        claim = driver.claim(claim.job_id)
    assert claim.attempt == 4
    assert driver.store.job(claim.job_id).state == JobState.RUNNING


def test_a_job_that_is_lost_in_every_attempt_fails(
    driver: StoreDriver, app: Celery, later: Callable[[int], datetime]
) -> None:
    claim = driver.running(max_attempts=1)
    child, _ = driver.create_job(driver.distill_spec({"job_id": claim.job_id}))
    for _ in range(MAX_FREE_LOSSES):
        assert sweep(driver.store, app, now=later(2)) == [(claim.job_id, "teacher")]
        claim = driver.claim(claim.job_id)
    assert sweep(driver.store, app, now=later(2)) == []
    job = driver.store.job(claim.job_id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.LOST)
    assert driver.store.job(child.id).reason == Reason.PARENT_FAILED


def test_a_job_lost_while_it_was_cancelled_is_cancelled(
    driver: StoreDriver, app: Celery, later: Callable[[int], datetime]
) -> None:
    claim = driver.running()
    driver.store.request_cancel(claim.job_id)
    sweep(driver.store, app, now=later(2))
    assert driver.store.job(claim.job_id).state == JobState.CANCELLED


def test_a_heartbeat_keeps_the_job(
    driver: StoreDriver, app: Celery, later: Callable[[int], datetime]
) -> None:
    claim = driver.running()
    driver.store.heartbeat(claim, lease_seconds=600)
    assert sweep(driver.store, app, now=later(2)) == []
    assert driver.store.job(claim.job_id).state == JobState.RUNNING


def test_a_lost_message_is_sent_again_when_it_is_overdue(
    driver: StoreDriver, app: Celery, later: Callable[[int], datetime]
) -> None:
    job = driver.queued()
    assert sweep(driver.store, app) == []
    assert sweep(driver.store, app, now=later(1)) == [(job.id, "teacher")]
    assert depth(app, "teacher") == 1


def test_a_queue_with_messages_never_grows_by_duplicates(
    driver: StoreDriver, app: Celery, later: Callable[[int], datetime]
) -> None:
    for _ in range(3):
        driver.queued()
    for minutes in range(1, 6):
        sweep(driver.store, app, now=later(minutes))
    assert depth(app, "teacher") == 3


def test_each_kind_is_sent_to_its_own_queue(
    driver: StoreDriver, app: Celery, later: Callable[[int], datetime]
) -> None:
    teacher = driver.succeed(driver.running())
    driver.create_job(driver.distill_spec({"model_id": teacher}))
    sweep(driver.store, app, now=later(1))
    assert (depth(app, "teacher"), depth(app, "distill")) == (0, 1)


def test_concurrent_sweeps_send_each_job_once(
    driver: StoreDriver, app: Celery, at_once: AtOnce
) -> None:
    claims = [driver.running() for _ in range(5)]
    for claim in claims:
        # By the database's own clock: a sweep that runs ahead of it would find jobs overdue that
        # another has only just queued again.
        driver.store.heartbeat(claim, lease_seconds=-1)
    sent = [queued for found in at_once(4, lambda _: sweep(driver.store, app)) for queued in found]
    assert sorted(queued.job_id for queued in sent) == sorted(claim.job_id for claim in claims)


def test_an_unreachable_broker_does_not_keep_the_sweep_from_ending_lost_attempts(
    driver: StoreDriver, later: Callable[[int], datetime]
) -> None:
    app = make_celery(driver.settings)  # its broker is a closed port
    claim = driver.running()
    assert sweep(driver.store, app, now=later(2)) == []
    assert driver.store.job(claim.job_id).state == JobState.QUEUED
