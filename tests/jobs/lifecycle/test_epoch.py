"""The epoch ties database and files: where one is older or another's, nothing is removed."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from services.shared.jobs.db.connection import transaction
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.tables import EpochRow
from services.shared.jobs.lifecycle.epoch import (
    EPOCH_FILE,
    EpochMismatch,
    adopt_epoch,
    check_epoch,
    tick_epoch,
)
from services.shared.jobs.lifecycle.tidy import tidy

if TYPE_CHECKING:
    from tests.jobs.conftest import StoreDriver


@pytest.fixture
def lifecycle(driver: StoreDriver) -> LifecycleStore:
    return LifecycleStore(driver.store)


def set_counter(lifecycle: LifecycleStore, counter: int) -> None:
    """Do to the database what restoring an older one does."""
    with transaction(lifecycle.engine) as session:
        row = session.query(EpochRow).one()
        row.counter = counter


def test_every_sweep_counts_on_in_both(lifecycle: LifecycleStore) -> None:
    check_epoch(lifecycle)  # a new database has none
    for expected in (1, 2, 3):
        tick_epoch(lifecycle)
        epoch = lifecycle.epoch()
        assert epoch is not None
        assert epoch.counter == expected
        marker = json.loads((lifecycle.settings.data_dir / EPOCH_FILE).read_text())
        assert (marker["id"], marker["counter"]) == (epoch.id, expected - 1)
    check_epoch(lifecycle)


def test_a_crash_between_file_and_commit_is_no_mismatch(lifecycle: LifecycleStore) -> None:
    tick_epoch(lifecycle)
    set_counter(lifecycle, 0)  # the file was written, the transaction was not committed
    tick_epoch(lifecycle)
    check_epoch(lifecycle)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("older database", "the database is older than the files"),
        ("another database", "belongs to another database"),
        ("no marker", "is missing"),
        ("half a marker", "is damaged"),
        ("older files", "the files of .* are older than the database"),
    ],
)
def test_a_mismatch_stops_every_removal_until_it_is_adopted(
    driver: StoreDriver, lifecycle: LifecycleStore, fault: str, message: str
) -> None:
    for _ in range(3):
        tick_epoch(lifecycle)
    path = lifecycle.settings.data_dir / EPOCH_FILE
    marker = json.loads(path.read_text())
    if fault == "older database":
        set_counter(lifecycle, 1)
    elif fault == "another database":
        path.write_text(json.dumps(marker | {"id": "other"}))
    elif fault == "no marker":
        path.unlink()
    elif fault == "half a marker":
        path.write_text(path.read_text()[:20])
    else:
        ticked_at = lifecycle.now() - timedelta(hours=2)
        path.write_text(json.dumps(marker | {"ticked_at": ticked_at.isoformat()}))
    orphan = driver.settings.model_dir(driver.running().model_id)
    orphan.mkdir(parents=True)
    for act in (check_epoch, tick_epoch, lambda _: tidy(driver.store)):
        with pytest.raises(EpochMismatch, match=message):
            act(lifecycle)
    assert orphan.is_dir()
    adopt_epoch(lifecycle)
    check_epoch(lifecycle)
    tick_epoch(lifecycle)
    tidy(driver.store)
