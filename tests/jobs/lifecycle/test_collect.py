"""Retention by default, kind and tag; what was deleted goes after its grace period; a dry run only looks."""

from __future__ import annotations

import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import func, update

from services.shared.jobs.db.connection import transaction
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.tables import DatasetRow
from services.shared.jobs.lifecycle.collect import find
from services.shared.jobs.lifecycle.tidy import tidy
from services.shared.jobs.retention import Retention, RetentionPeriods
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.state import JobState
from tests.factories import failed

if TYPE_CHECKING:
    from tests.jobs.conftest import StoreDriver

DAY = timedelta(days=1)


def write_run(driver: StoreDriver, job_id: str, attempt: int = 1) -> RunDirectory:
    run = RunDirectory(driver.settings.run_dir(job_id, attempt))
    for path in (run.checkpoints / "step-1" / "COMPLETE", run.memory_file(0), run.spec):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 10)
    run.log.write_text("log")
    run.progress.write_text("{}\n")
    return run


def keep(driver: StoreDriver, **periods: Any) -> LifecycleStore:
    """Return the store with retention as given and everything else kept for ever."""
    never = dict.fromkeys(RetentionPeriods.model_fields)
    retention = Retention.model_validate({**never, "signals_days": None, **periods})
    driver.settings = driver.settings.model_copy(update={"retention": retention})
    driver.store.settings = driver.settings
    return LifecycleStore(driver.store)


def failed_job(driver: StoreDriver, **fields: Any) -> str:
    claim = driver.running(**fields)
    driver.store.finish(claim, failed())
    write_run(driver, claim.job_id)
    return claim.job_id


def removed(driver: StoreDriver, lifecycle: LifecycleStore, after: timedelta) -> Counter[str]:
    return Counter(each.what for each in tidy(driver.store, now=lifecycle.now() + after))


@pytest.mark.parametrize(
    ("period", "gone", "stays"),
    [
        ("checkpoints_days", "checkpoints", "torchrun.log"),
        ("logs_days", "torchrun.log", "progress.jsonl"),
        ("metrics_days", "progress.jsonl", "checkpoints"),
    ],
)
def test_files_of_an_ended_job_go_after_their_period_and_nothing_else(
    driver: StoreDriver, period: str, gone: str, stays: str
) -> None:
    lifecycle = keep(driver, **{period: 2})
    job_id, running = failed_job(driver), driver.running().job_id
    write_run(driver, running)
    run, other = driver.settings.run_dir(job_id, 1), driver.settings.run_dir(running, 1)
    assert removed(driver, lifecycle, DAY) == {}
    assert removed(driver, lifecycle, 3 * DAY) == {period.removesuffix("_days"): 1}
    assert not (run / gone).exists()
    assert (run / stays).exists()
    assert (run / "spec.json").exists()
    assert (other / gone).exists()
    assert removed(driver, lifecycle, 3 * DAY) == {}


def test_a_tag_overrides_the_kind_which_overrides_the_default(driver: StoreDriver) -> None:
    lifecycle = keep(
        driver,
        checkpoints_days=10,
        kinds={"teacher": {"checkpoints_days": 5}},
        tags={"scratch": {"checkpoints_days": 1}, "paper": {"checkpoints_days": None}},
    )
    plain, scratch, both = (
        failed_job(driver, tags=tags) for tags in ([], ["scratch"], ["scratch", "paper"])
    )
    for days, gone in ((2, {scratch}), (6, {plain}), (1000, set())):
        found = tidy(driver.store, now=lifecycle.now() + days * DAY)
        assert {each.id for each in found} == gone, days
    assert driver.settings.run_dir(both, 1).joinpath("checkpoints").is_dir()


def test_checkpoints_that_an_unfinished_retry_may_resume_from_stay(driver: StoreDriver) -> None:
    lifecycle = keep(driver, checkpoints_days=0)
    first = failed_job(driver)
    second = driver.retry(first).id
    driver.store.finish(driver.claim(second), failed())
    third = driver.retry(second).id
    assert removed(driver, lifecycle, DAY) == {}
    driver.store.request_cancel(third)
    assert removed(driver, lifecycle, DAY) == {"checkpoints": 1}


def test_failed_jobs_and_unpromoted_models_are_deleted_softly_first(driver: StoreDriver) -> None:
    lifecycle = keep(driver, failed_runs_days=1, unpromoted_models_days=1, finished_runs_days=1)
    job_id = failed_job(driver)
    teacher = driver.succeed(driver.running())
    student_job, _ = driver.create_job(driver.distill_spec({"model_id": teacher}))
    student = driver.succeed(driver.claim(student_job.id))
    promoted = driver.succeed(driver.running())
    driver.store.promote(promoted)
    # The teacher stays as long as it has a student.
    assert removed(driver, lifecycle, 2 * DAY) == {"failed_runs": 1, "unpromoted_models": 1}
    assert driver.store.job(job_id).deleted_by == "retention"
    assert driver.store.model(student).deleted_by == "retention"
    assert driver.settings.run_dir(job_id, 1).is_dir()
    # The grace period counts from now, by the clock of the database; then files and rows are gone.
    assert removed(driver, lifecycle, 2 * DAY)["unpromoted_models"] == 1
    found = removed(driver, lifecycle, 8 * DAY)
    assert (found["deleted_jobs"], found["deleted_models"]) == (2, 2)
    assert not driver.settings.run_dir(job_id, 1).exists()
    assert not driver.settings.model_dir(teacher).exists()
    removed(driver, lifecycle, 16 * DAY)
    assert [job.id for job in driver.store.list_jobs().items] == [
        driver.store.model(promoted).job_id
    ]


def test_a_model_that_no_alias_serves_any_more_goes_after_its_period(driver: StoreDriver) -> None:
    lifecycle = keep(driver, superseded_models_days=2)
    first, second = (driver.succeed(driver.running()) for _ in range(2))
    driver.store.promote(first)
    newer = driver.store.promote(second)
    assert removed(driver, lifecycle, 3 * DAY) == {}  # it may be refused, and then the first serves
    driver.store.report_served(newer.id, engine="padded")
    assert removed(driver, lifecycle, DAY) == {}
    assert removed(driver, lifecycle, 3 * DAY) == {"superseded_models": 1}
    assert driver.store.model(first).deleted_by == "retention"
    assert driver.store.model(second).deleted_by is None


def test_events_go_after_their_period(driver: StoreDriver) -> None:
    lifecycle = keep(driver, events_days=1)
    job_id, queued = failed_job(driver), driver.queued().id
    assert removed(driver, lifecycle, 2 * DAY) == {"events": 1}
    assert driver.store.events(job_id) == []
    assert len(driver.store.events(queued)) == 1


def test_cached_signals_go_when_they_were_not_read_for_their_period(driver: StoreDriver) -> None:
    lifecycle = keep(driver, signals_days=5)
    driver.settings.signals_dir.mkdir()
    old, new = (driver.settings.signals_dir / f"{name}.safetensors" for name in ("old", "new"))
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (1, 1))
    assert removed(driver, lifecycle, DAY) == {"signals": 1}
    assert (old.exists(), new.exists()) == (False, True)


def test_a_dry_run_finds_what_a_real_run_removes_and_changes_nothing(driver: StoreDriver) -> None:
    lifecycle = keep(driver, checkpoints_days=1, failed_runs_days=1)
    job_id = failed_job(driver)
    gone = driver.in_state(JobState.CANCELLED)
    run = write_run(driver, gone)
    lifecycle.delete("job", gone, by="ops")
    now = lifecycle.now() + 8 * DAY
    seen = list(find(lifecycle, now=now))
    assert driver.store.job(job_id).deleted_at is None
    assert run.checkpoints.is_dir()
    assert tidy(driver.store, now=now) == seen
    assert {each.what: each.size_bytes for each in seen}["deleted_jobs"] > 0
    assert not run.path.exists()


def test_files_left_by_a_process_killed_after_the_purge_are_removed_later(
    driver: StoreDriver,
) -> None:
    lifecycle = keep(driver)
    job_id = failed_job(driver)
    lifecycle.delete("job", job_id, by="ops")
    assert lifecycle.purge("job", job_id, now=lifecycle.now() + 8 * DAY)
    assert removed(driver, lifecycle, 8 * DAY) == {"deleted_jobs": 1}
    assert not (driver.settings.runs_dir / job_id).exists()


def test_nothing_is_removed_while_another_process_removes_or_reads(driver: StoreDriver) -> None:
    lifecycle = keep(driver, checkpoints_days=0)
    failed_job(driver)
    with lifecycle.removal() as may_remove:
        assert may_remove
        assert removed(driver, lifecycle, DAY) == {}
    assert removed(driver, lifecycle, DAY) == {"checkpoints": 1}


def test_a_resource_that_an_older_process_used_after_its_deletion_stays(
    driver: StoreDriver,
) -> None:
    lifecycle = keep(driver)
    lifecycle.delete("dataset", driver.dataset_id, by="ops")
    lifecycle.restore("dataset", driver.dataset_id)
    driver.queued()

    with transaction(lifecycle.engine) as session:  # deleted, yet a job has been queued since
        session.execute(update(DatasetRow).values(deleted_at=func.now(), deleted_by="ops"))
    tidy(driver.store, now=lifecycle.now() + 30 * DAY)
    assert Path(driver.settings.dataset_dir(driver.dataset_id)).is_dir()
