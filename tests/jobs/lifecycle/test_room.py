"""Room on the disk and in quotas: jobs wait with a reason, uploads and further jobs are refused."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

import pytest

from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.usage_queries import UsageSample
from services.shared.jobs.errors import QueueQuotaExceeded, StorageQuotaExceeded
from services.shared.jobs.lifecycle.disk import (
    disk_use,
    full_disk_for_jobs,
    full_disk_for_uploads,
)
from services.shared.jobs.lifecycle.report import storage_report
from services.shared.jobs.lifecycle.usage import forecast, sample_usage
from services.shared.jobs.projects import Access
from services.shared.jobs.quota import Quota
from services.shared.jobs.resolved_spec import PlannedSpec
from services.shared.jobs.state import JobState
from services.shared.launch.task import run_job

if TYPE_CHECKING:
    from tests.jobs.conftest import AtOnce, StoreDriver


def key(name: str, **quota: int) -> Access:
    return Access(actor=name, quota=Quota(**quota))


def submit(driver: StoreDriver, access: Access) -> str:
    planned = PlannedSpec(driver.store.resolve(driver.teacher_spec()))
    return driver.store.within(access).create_job(planned)[0].id


def test_a_full_disk_leaves_jobs_in_the_queue_with_the_reason(driver: StoreDriver) -> None:
    job_id = driver.queued().id
    assert full_disk_for_jobs(driver.settings) is None or disk_use(driver.settings.data_dir)
    driver.store.settings = driver.settings.model_copy(update={"disk_full_share": 1e-9})
    run_job(
        job_id,
        store=driver.store,
        module="unused",
        worker="w",
        stopping=lambda: False,
        send=lambda _: None,
    )
    job = driver.store.job(job_id)
    assert (job.state, job.attempt) == (JobState.QUEUED, 0)
    assert job.message is not None
    assert job.message.startswith("Waits: the disk of the ")
    assert "stillhouse gc" in job.message
    assert full_disk_for_uploads(driver.store.settings) is not None
    driver.claim(job_id)
    assert driver.store.job(job_id).message is None


def test_a_key_has_no_more_queued_jobs_than_its_quota_even_in_parallel(
    driver: StoreDriver, at_once: AtOnce
) -> None:
    ci = key("ci", queued_jobs=2)

    def send(number: int) -> str:
        try:
            return submit(driver, ci)
        except QueueQuotaExceeded as refused:
            return str(refused)

    outcomes = at_once(5, send)
    accepted = [outcome for outcome in outcomes if outcome.startswith("job_")]
    assert len(accepted) == 2
    assert outcomes.count(next(o for o in outcomes if o not in accepted)) == 3
    assert submit(driver, key("another", queued_jobs=1))
    driver.claim(accepted[0])
    assert submit(driver, ci)


def test_a_job_beyond_the_quota_of_running_jobs_waits_with_the_reason(
    driver: StoreDriver,
) -> None:
    ci = key("ci", running_jobs=1)
    first, second, other = (submit(driver, who) for who in (ci, ci, key("another")))
    claim = driver.claim(first)
    assert driver.store.claim(second, worker="w2", lease_seconds=60) is None
    assert driver.store.job(second).message == (
        "Waits: the key ci runs 1 jobs, and its quota is 1 at once."
    )
    assert driver.claim(other)
    again = driver.store.claim(first, worker="w", lease_seconds=60, token=claim.token)
    assert again is not None  # a repeated claim is no second job
    driver.succeed(claim)
    driver.claim(second)


def test_a_key_that_stores_its_quota_sends_no_job_until_files_are_gone(
    driver: StoreDriver,
) -> None:
    model_id = driver.succeed(driver.claim(submit(driver, key("ci"))))  # of 40 bytes
    ci = key("ci", stored_bytes=40)
    with pytest.raises(StorageQuotaExceeded, match="stores 40 bytes"):
        submit(driver, ci)
    lifecycle = LifecycleStore(driver.store)
    roomy = LifecycleStore(driver.store.within(key("ci", stored_bytes=50)))
    roomy.check_storage(more_bytes=10)
    with pytest.raises(StorageQuotaExceeded):
        roomy.check_storage(more_bytes=11)
    lifecycle.delete("model", model_id, by="ci")
    with pytest.raises(StorageQuotaExceeded):
        submit(driver, ci)
    lifecycle.purge("model", model_id, now=lifecycle.now() + timedelta(days=8))
    submit(driver, ci)


def sample(day: float, used: int) -> UsageSample:
    start = datetime(2026, 1, 1, tzinfo=timezone.utc)
    return UsageSample(start + timedelta(days=day), 1000, used, {})


def test_the_forecast_is_the_line_through_the_samples() -> None:
    found = forecast([sample(day, 100 + 10 * day) for day in range(5)], full_share=0.9)
    assert found is not None
    assert found.bytes_per_day == pytest.approx(10)
    assert found.days_until_full == pytest.approx((900 - 140) / 10)


@pytest.mark.parametrize("used", [[100, 100, 100], [300, 200, 100]])
def test_a_disk_that_does_not_grow_is_never_full(used: list[int]) -> None:
    found = forecast([sample(day, value) for day, value in enumerate(used)], full_share=0.9)
    assert found is not None
    assert found.days_until_full is None


def test_samples_of_less_than_an_hour_give_no_forecast() -> None:
    assert forecast([sample(0, 1), sample(0.01, 900)], full_share=0.9) is None


def test_a_sample_names_every_kind_of_file_and_the_database(driver: StoreDriver) -> None:
    lifecycle = LifecycleStore(driver.store)
    driver.succeed(driver.running())
    run = driver.settings.run_dir("job_x", 1)
    for name, size in (("checkpoints/a", 7), ("torchrun.log", 5), ("progress.jsonl", 3)):
        path = run / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    (run / "spec.json").write_bytes(b"{}")
    sample_usage(lifecycle)
    report = storage_report(lifecycle)
    stored = report.stored_bytes
    runs = {kind: stored[kind] for kind in ("checkpoints", "logs", "metrics", "runs")}
    assert runs == {"checkpoints": 7, "logs": 5, "metrics": 3, "runs": 2}
    assert stored["models"] == 2
    assert stored["database"] > 1_000_000
    assert {"signals", "quarantine", "uploads", "datasets"} <= set(stored)
    assert report.epoch_problem is None
    assert 0 < report.disk.share < 1
