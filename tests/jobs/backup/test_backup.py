"""A backup survives the loss of database and files, is incremental, and damage in it is noticed."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psycopg
import pytest

from services.cli.embedded.servers import Server
from services.shared.jobs.backup.create import create_backup
from services.shared.jobs.backup.layout import FILES, backups_in, find_backup, read_files
from services.shared.jobs.backup.restore import restore_backup
from services.shared.jobs.backup.verify import verify_backup
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.snapshot.connection import connect, table_shapes
from services.shared.jobs.db.store import open_store
from services.shared.jobs.errors import Conflict
from services.shared.jobs.lifecycle.epoch import check_epoch, tick_epoch
from services.shared.jobs.run_directory import COMPLETE, RunDirectory
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.state import JobState

if TYPE_CHECKING:
    from tests.jobs.conftest import StoreDriver


@pytest.fixture
def empty_platform(postgres: Server, tmp_path: Path) -> Iterator[JobSettings]:
    """The settings of a platform whose database was never migrated and whose data directory is absent."""
    admin = postgres.url.replace("+psycopg", "").replace("/stillhouse?", "/postgres?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE DATABASE restored TEMPLATE template0")
    url = postgres.url.replace("/stillhouse?", "/restored?")
    yield JobSettings(database_url=url, broker_url="redis://nowhere", data_dir=tmp_path / "new")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("DROP DATABASE restored WITH (FORCE)")


def checkpoint(run: RunDirectory, step: int) -> Path:
    path = run.checkpoints / f"step-{step:08d}"
    path.mkdir(parents=True)
    (path / "rank-00000.safetensors").write_bytes(os.urandom(3000))
    (path / COMPLETE).write_text("{}")
    return path


def fill(driver: StoreDriver) -> dict[str, str]:
    """Make a platform with every kind of row and file; return its jobs by state."""
    dataset = driver.settings.dataset_dir(driver.dataset_id)
    (dataset / "train.parquet").write_bytes(os.urandom(5000))
    jobs = {str(state): driver.in_state(state) for state in JobState}
    model_id = driver.store.model(jobs["succeeded"]).id
    promotion = driver.store.promote(
        model_id, force=True, reason="tab\there, line\nbreak, \\N and ü"
    )
    driver.store.report_served(promotion.id, engine="padded")
    run = RunDirectory(driver.settings.run_dir(jobs["running"], 1))
    checkpoint(run, 4)
    run.log.write_text("step 4\n")
    return jobs


def rows_of(url: str) -> dict[str, set[tuple[Any, ...]]]:
    with connect(url) as connection:
        return {
            shape.name: {
                tuple(map(repr, row)) for row in connection.execute(f"SELECT * FROM {shape.name}")
            }
            for shape in table_shapes(connection)
        }


def hashes_below(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "epoch.json"
    }


def test_everything_is_as_before_after_the_loss_of_database_and_files(
    driver: StoreDriver, empty_platform: JobSettings, tmp_path: Path
) -> None:
    jobs = fill(driver)
    tick_epoch(LifecycleStore(driver.store))
    rows, files = rows_of(driver.settings.database_url), hashes_below(driver.settings.data_dir)
    create_backup(driver.settings, tmp_path / "backups")

    restored = restore_backup(empty_platform, find_backup(tmp_path / "backups"), replace=False)

    assert hashes_below(empty_platform.data_dir) == files
    found = rows_of(empty_platform.database_url)
    unchanged = set(rows) - {"epochs", "jobs", "attempts", "events"}
    assert {name: found[name] for name in unchanged} == {name: rows[name] for name in unchanged}
    assert len(found["jobs"]) == len(rows["jobs"])
    # What ran is queued again; a cancellation that was under way is done.
    assert restored.requeued_jobs == [jobs["running"]]
    store = open_store(empty_platform)
    states = {state: store.job(job_id).state for state, job_id in jobs.items()}
    assert states == {state: state for state in jobs} | {
        "running": "queued",
        "cancelling": "cancelled",
    }
    claim = store.claim(jobs["running"], worker="w", lease_seconds=60)
    assert claim is not None
    assert claim.attempt == 2
    assert claim.resume_dir == RunDirectory(empty_platform.run_dir(jobs["running"], 1)).checkpoints
    assert store.active() is not None
    # Generated numbers go on, and the epoch is a new one.
    newest = store.promotions().items[0].seq
    assert store.promote(jobs["succeeded"]).seq > newest
    lifecycle = LifecycleStore(store)
    check_epoch(lifecycle)
    epoch, former = lifecycle.epoch(), LifecycleStore(driver.store).epoch()
    assert epoch is not None
    assert former is not None
    assert epoch.id != former.id
    store.engine.dispose()


def test_a_second_backup_copies_only_what_changed_and_stands_by_itself(
    driver: StoreDriver, tmp_path: Path
) -> None:
    jobs = fill(driver)
    first, before = create_backup(driver.settings, tmp_path / "backups")
    assert before.num_copied_files == before.num_files == 5
    run = RunDirectory(driver.settings.run_dir(jobs["running"], 1))
    run.log.write_text("step 4\nstep 5\n")
    (run.checkpoints / "step-00000008.partial").mkdir()
    new = checkpoint(run, 8)
    second, after = create_backup(driver.settings, tmp_path / "backups")
    assert after.num_copied_files == 3  # the log and the checkpoint
    for file in read_files(second):
        shared = (first / FILES / file.path).exists() and file.path.endswith(".parquet")
        if shared:
            assert (second / FILES / file.path).samefile(first / FILES / file.path)
    assert any(new.name in file.path for file in read_files(second))
    for path in (first / FILES).rglob("*"):  # the first one is removed
        path.unlink() if path.is_file() else None
    verify_backup(second)


@pytest.mark.parametrize("damage", ["file", "missing", "rows", "list", "record"])
def test_damage_is_noticed_and_nothing_is_restored_from_it(
    driver: StoreDriver, empty_platform: JobSettings, tmp_path: Path, damage: str
) -> None:
    fill(driver)
    backup, _ = create_backup(driver.settings, tmp_path / "backups")
    verify_backup(backup)
    path = {
        "file": next((backup / FILES / "datasets").rglob("*.parquet")),
        "missing": next((backup / FILES / "models").rglob("manifest.json")),
        "rows": backup / "tables" / "jobs.copy.gz",
        "list": backup / "files.jsonl",
        "record": backup / "backup.json",
    }[damage]
    if damage == "missing":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    with pytest.raises(Conflict):
        restore_backup(empty_platform, backup, replace=False)
    assert not empty_platform.data_dir.exists()


def test_an_occupied_platform_is_not_overwritten_unless_asked_for(
    driver: StoreDriver, tmp_path: Path
) -> None:
    jobs = fill(driver)
    backup, _ = create_backup(driver.settings, tmp_path / "backups")
    added = driver.queued().id
    driver.store.engine.dispose()
    with pytest.raises(Conflict, match="--replace"):
        restore_backup(driver.settings, backup, replace=False)
    assert driver.store.job(added).id == added
    with pytest.raises(Conflict, match="is in use by 1 other connections"):
        restore_backup(driver.settings, backup, replace=True)
    driver.store.engine.dispose()
    restored = restore_backup(driver.settings, backup, replace=True)
    assert restored.replaced is not None
    assert {job.id for job in driver.store.list_jobs(limit=500).items} >= set(jobs.values())
    assert added not in {job.id for job in driver.store.list_jobs(limit=500).items}


def test_a_backup_inside_of_the_data_directory_is_refused(driver: StoreDriver) -> None:
    with pytest.raises(Conflict, match="must survive its loss"):
        create_backup(driver.settings, driver.settings.data_dir / "backups")


def test_backups_under_load_hold_every_file_that_their_rows_name(
    driver: StoreDriver, tmp_path: Path
) -> None:
    """Jobs run, save, rotate their checkpoints, finish and are deleted while five backups are made."""
    stop, failures = threading.Event(), []

    def work() -> None:
        try:
            while not stop.is_set():
                claim = driver.running()
                run = RunDirectory(driver.settings.run_dir(claim.job_id, claim.attempt))
                former = checkpoint(run, 1)
                checkpoint(run, 2)
                for file in former.iterdir():
                    file.unlink()
                former.rmdir()
                driver.succeed(claim)
        except Exception as error:  # noqa: BLE001  (the thread's boundary)
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            create_backup(driver.settings, tmp_path / "backups")
    finally:
        stop.set()
        thread.join()
    assert failures == []
    backups = backups_in(tmp_path / "backups")
    assert len(backups) == 5
    for backup in backups:
        record = verify_backup(backup)
        files = {file.path for file in read_files(backup)}
        models = {path.split("/")[1] for path in files if path.startswith("models/")}
        counts = {table.name: table.rows for table in record.tables}
        assert len(models) == counts["models"]
