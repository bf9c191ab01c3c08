"""What killed processes leave on disk goes; what a row or a running attempt needs stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from services.shared.jobs.cleanup import remove_leftovers
from services.shared.jobs.ids import model_id_of
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.state import JobState, Reason

if TYPE_CHECKING:
    from tests.jobs.conftest import StoreDriver

RETRY = Outcome(end=End.RETRY, reason=Reason.CRASHED, message="killed")


def artifact(driver: StoreDriver, name: str) -> Path:
    path = driver.settings.model_dir(name)
    path.mkdir(parents=True, exist_ok=True)
    (path / "manifest.json").touch()
    return path


def test_artifacts_of_attempts_that_were_killed_before_their_row_are_quarantined(
    driver: StoreDriver,
) -> None:
    first = driver.running()
    orphan = artifact(driver, first.model_id)
    driver.store.finish(first, RETRY)
    kept = driver.settings.model_dir(driver.succeed(driver.claim(first.job_id)))
    given_up = artifact(driver, model_id_of(driver.in_state(JobState.FAILED), 1))
    assert set(remove_leftovers(driver.store)) == {orphan, given_up}
    assert [orphan.exists(), given_up.exists(), kept.exists()] == [False, False, True]
    moved = list(driver.settings.quarantine_dir.glob("*/*/manifest.json"))
    assert {path.parent.name for path in moved} == {orphan.name, given_up.name}
    assert remove_leftovers(driver.store) == []


def test_artifacts_of_running_attempts_and_of_unknown_jobs_are_kept(driver: StoreDriver) -> None:
    running = artifact(driver, driver.running().model_id)
    cancelling = artifact(driver, model_id_of(driver.in_state(JobState.CANCELLING), 1))
    unknown = artifact(driver, "mdl_00000000000000000000000000_1")
    other = artifact(driver, "base-model")
    assert remove_leftovers(driver.store) == []
    assert all(path.exists() for path in (running, cancelling, unknown, other))


def test_checkpoints_are_removed_once_their_job_has_succeeded(driver: StoreDriver) -> None:
    def save(job_id: str) -> Path:
        path = driver.settings.run_dir(job_id, 1) / "checkpoints"
        (path / "step-00000001").mkdir(parents=True)
        return path

    needed = [save(driver.in_state(state)) for state in (JobState.RUNNING, JobState.FAILED)]
    needless = save(driver.in_state(JobState.SUCCEEDED))
    assert remove_leftovers(driver.store) == [needless]
    assert all(path.is_dir() for path in needed)


def test_an_interrupted_upload_is_removed_after_a_day(driver: StoreDriver) -> None:
    old, new = (driver.settings.datasets_dir / f".ds_{name}.7.partial" for name in ("old", "new"))
    for path in (old, new):
        path.mkdir()
    os.utime(old, (1, 1))
    assert remove_leftovers(driver.store) == [old]
    assert new.is_dir()


def test_a_quarantined_artifact_is_removed_after_a_week(driver: StoreDriver) -> None:
    old, new = (
        driver.settings.quarantine_dir / day / "mdl_1_1" for day in ("2020-01-01", "2999-01-01")
    )
    for path in (old, new):
        path.mkdir(parents=True)
    assert remove_leftovers(driver.store) == [old.parent]
    assert not old.exists()
    assert new.is_dir()


def test_an_older_database_over_newer_files_loses_no_model_and_repeats_no_attempt(
    driver: StoreDriver,
) -> None:
    job_id = driver.in_state(JobState.QUEUED)
    # What attempt 1 of the newer database has written, which this one knows nothing of.
    finished = artifact(driver, model_id_of(job_id, 1))
    run = driver.settings.run_dir(job_id, 1)
    run.mkdir(parents=True)
    claim = driver.claim(job_id)
    assert claim.attempt == 2
    assert claim.model_id != finished.name
    remove_leftovers(driver.store)
    assert len(list(driver.settings.quarantine_dir.glob(f"*/{finished.name}/manifest.json"))) == 1
