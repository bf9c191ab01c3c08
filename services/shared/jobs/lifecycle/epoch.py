"""The epoch marker: `epoch.json` in the data directory and a row in the database, which belong together.

A sweep removes what no row needs. Where the database is older than the files, or another one, that would be
what people need. So every sweep first writes the database's counter to the file and then, in the same
transaction, counts on: a file that is ahead of its database means that an older database was restored.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

from pydantic import BaseModel, ValidationError

from services.shared.files.atomic_write import write_text
from services.shared.jobs.db.epochs import Epoch
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.errors import Unavailable

EPOCH_FILE = "epoch.json"
# A shared file system may show other nodes an older file for a minute.
_MOST_LAG = timedelta(hours=1)


class EpochMismatch(Unavailable):
    """Database and files do not belong together: nothing is removed."""


class EpochFile(BaseModel):
    """The content of `epoch.json`."""

    id: str
    counter: int
    ticked_at: datetime


def check_epoch(lifecycle: LifecycleStore) -> None:
    """Compare the database with its data directory. Raises EpochMismatch, Unavailable."""
    epoch = lifecycle.epoch()
    if epoch is not None:
        _compare(lifecycle.settings.data_dir, epoch)


def tick_epoch(lifecycle: LifecycleStore) -> None:
    """Compare, then count on in both. Raises EpochMismatch, Unavailable, OSError.

    A new database takes a data directory without a marker as its own.
    """
    data_dir = lifecycle.settings.data_dir

    def compare_and_write(epoch: Epoch) -> None:
        _compare(data_dir, epoch)
        _write(data_dir, epoch)

    lifecycle.tick_epoch(compare_and_write)


def adopt_epoch(lifecycle: LifecycleStore) -> None:
    """Declare that database and files belong together from now on: both get a new epoch."""
    data_dir = lifecycle.settings.data_dir
    lifecycle.begin_epoch(lambda epoch: _write(data_dir, epoch))


def _write(data_dir: Path, epoch: Epoch) -> None:
    marker = EpochFile(id=epoch.id, counter=epoch.counter, ticked_at=epoch.read_at)
    write_text(data_dir / EPOCH_FILE, marker.model_dump_json())


def _compare(data_dir: Path, epoch: Epoch) -> None:
    path = data_dir / EPOCH_FILE
    try:
        marker = EpochFile.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        if epoch.counter == 0:
            return
        raise _mismatch(f"{path} is missing, though this database has had one") from None
    except ValidationError:
        raise _mismatch(f"{path} is damaged") from None
    if marker.id != epoch.id:
        raise _mismatch(f"{path} belongs to another database")
    if marker.counter > epoch.counter:
        raise _mismatch(f"the database is older than the files of {data_dir}")
    if epoch.ticked_at - marker.ticked_at > _MOST_LAG:
        raise _mismatch(f"the files of {data_dir} are older than the database")


def _mismatch(what: str) -> EpochMismatch:
    return EpochMismatch(
        f"Database and data directory do not belong together: {what}. Nothing is removed until both are "
        "restored from the same backup (`stillhouse restore`), or `stillhouse gc --adopt` declares that "
        "they belong together."
    )
