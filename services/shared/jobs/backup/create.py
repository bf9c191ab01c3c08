"""Makes a backup while the platform runs.

The tables come from one snapshot of the database, then the files of its rows are copied; meanwhile no process
removes files. Files of datasets and models never change. Of a running job the newest complete checkpoint is
copied, from which it resumes after a restoration.
"""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path

from services.shared.files.atomic_write import PARTIAL, sync
from services.shared.files.hashing import file_sha256
from services.shared.jobs.backup.copying import copy_files
from services.shared.jobs.backup.layout import (
    FILE_LIST,
    TABLES,
    BackupRecord,
    backups_in,
    write_record,
)
from services.shared.jobs.db.snapshot.dump import dump_tables, removals_stopped
from services.shared.jobs.errors import Conflict
from services.shared.jobs.settings import JobSettings


def create_backup(settings: JobSettings, directory: Path) -> tuple[Path, BackupRecord]:
    """Make a backup below a directory; return its path and record.

    Raises Conflict for a directory inside of the data directory, Unavailable, OSError.
    """
    if directory.resolve().is_relative_to(settings.data_dir.resolve()):
        raise Conflict(
            f"{directory} is inside of the data directory: a backup must survive its loss."
        )
    directory.mkdir(parents=True, exist_ok=True)
    for left in directory.glob(f".*{PARTIAL}"):  # by a backup that was interrupted
        shutil.rmtree(left, ignore_errors=True)
    earlier = backups_in(directory)
    work = directory / f".{uuid.uuid4().hex}{PARTIAL}"
    try:
        with removals_stopped(settings.database_url):
            dump = dump_tables(settings.database_url, work / TABLES)
            counts = copy_files(
                settings.data_dir,
                work,
                tables=work / TABLES,
                before=earlier[-1] if earlier else None,
            )
        record = BackupRecord(
            taken_at=dump.taken_at,
            revision=dump.revision,
            tables=dump.tables,
            num_files=counts.num_files,
            num_bytes=counts.num_bytes,
            num_copied_files=counts.num_copied_files,
            num_copied_bytes=counts.num_copied_bytes,
            files_sha256=file_sha256(work / FILE_LIST),
        )
        write_record(work, record)
        final = directory / dump.taken_at.strftime("%Y%m%dT%H%M%S.%fZ")
        work.rename(final)
        sync(directory)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return final, record
