"""Restores a backup into an empty platform, or in place of what a platform holds."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from services.shared.files.atomic_write import sync
from services.shared.jobs.backup.layout import FILES, ROOTS, TABLES, BackupRecord, read_files
from services.shared.jobs.backup.verify import verify_backup
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.snapshot.load import check_target, load_tables
from services.shared.jobs.db.store import open_store
from services.shared.jobs.errors import Conflict
from services.shared.jobs.lifecycle.epoch import adopt_epoch
from services.shared.jobs.settings import JobSettings

_LATER = datetime(9999, 1, 1, tzinfo=timezone.utc)  # than the end of any lease


@dataclass(frozen=True)
class Restoration:
    """What was restored."""

    record: BackupRecord
    requeued_jobs: list[str]  # ran when the backup was made; they resume from their last checkpoint
    replaced: Path | None  # where the former files are now


def restore_backup(settings: JobSettings, backup: Path, *, replace: bool) -> Restoration:
    """Verify a backup, then restore files and tables; no process of the platform may run.

    Raises Conflict for a damaged backup, and for a platform that holds something unless `replace` is
    given: then its files are moved, and its rows discarded. Raises Unavailable, OSError.
    """
    record = verify_backup(backup)
    check_target(settings.database_url, record.tables, replace=replace)
    replaced = _clear(settings.data_dir, replace=replace)
    for file in read_files(backup):
        target = settings.data_dir / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(backup / FILES / file.path, target)
        shutil.copystat(backup / FILES / file.path, target)
        sync(target)
    load_tables(
        settings.database_url,
        backup / TABLES,
        record.tables,
        revision=record.revision,
    )
    return Restoration(record, _settle(settings), replaced)


def _clear(data_dir: Path, *, replace: bool) -> Path | None:
    """Make room for the files: raise Conflict, or move what is there."""
    held = [data_dir / name for name in ROOTS if any(_entries(data_dir / name))]
    if not held:
        return None
    if not replace:
        raise Conflict(f"{held[0]} is not empty. --replace moves what it holds.")
    replaced = data_dir / f"replaced-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}"
    replaced.mkdir(parents=True)
    for path in held:
        path.rename(replaced / path.name)
    return replaced


def _entries(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _settle(settings: JobSettings) -> list[str]:
    """Queue the jobs that ran when the backup was made, and begin a new epoch."""
    store = open_store(settings)
    try:
        requeued: list[str] = []
        while lost := store.end_lost_attempts(now=_LATER):
            requeued += [job.job_id for job in lost]
        adopt_epoch(LifecycleStore(store))
        return requeued
    finally:
        store.engine.dispose()
