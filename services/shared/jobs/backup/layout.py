"""What a backup consists of.

<directory>/<time>/backup.json       BackupRecord, written last: without it there is no backup
<directory>/<time>/tables/*.copy.gz  the rows of each table
<directory>/<time>/files.jsonl       FileRecord, a line for each file, in order of path
<directory>/<time>/files/...         the files, below datasets/, models/, runs/

A file that has not changed since the backup before is a hard link to the same file in that one. So each
backup is complete by itself, and can be removed by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from pydantic import BaseModel, ValidationError

from services.shared.files.sealed_json import seal, unseal
from services.shared.jobs.db.snapshot.dump import DumpedTable
from services.shared.jobs.errors import Conflict
from services.shared.jobs.run_directory import write_json

RECORD = "backup.json"
TABLES = "tables"
FILES = "files"
FILE_LIST = "files.jsonl"
ROOTS = ("datasets", "models", "runs")


class FileRecord(BaseModel):
    """One file of a backup."""

    path: str  # below `files`
    size: int
    mtime_ns: int  # of the original
    sha256: str


class BackupRecord(BaseModel):
    """One backup."""

    format: int = 2  # of sealed documents
    taken_at: datetime  # of the snapshot of the database
    revision: str  # of its schema
    tables: list[DumpedTable]
    num_files: int
    num_bytes: int
    num_copied_files: int  # the others are links to the backup before
    num_copied_bytes: int
    files_sha256: str  # of the list of files


def backups_in(directory: Path) -> list[Path]:
    """Return the complete backups below a directory, the oldest first."""
    return sorted(path.parent for path in directory.glob(f"[0-9]*/{RECORD}"))


def find_backup(directory: Path) -> Path:
    """Return a backup, or the newest one below a directory. Raises Conflict where there is none."""
    if (directory / RECORD).is_file():
        return directory
    found = backups_in(directory)
    if not found:
        raise Conflict(f"There is no backup in {directory}.")
    return found[-1]


def read_record(backup: Path) -> BackupRecord:
    """Return the record of a backup. Raises Conflict for a damaged one."""
    try:
        document = unseal((backup / RECORD).read_bytes())
        return BackupRecord.model_validate(document)
    except ValueError as error:
        raise Conflict(f"{backup / RECORD} is damaged.") from error


def write_record(backup: Path, record: BackupRecord) -> None:
    """Write the record of a backup with a checksum of its own. Raises OSError."""
    write_json(backup / RECORD, seal(record.model_dump(mode="json")))


def read_files(backup: Path) -> Iterator[FileRecord]:
    """Yield the files of a backup in order of their paths. Raises Conflict for a damaged list."""
    with (backup / FILE_LIST).open("rb") as lines:
        for line in lines:
            try:
                yield FileRecord.model_validate_json(line)
            except ValidationError as error:
                raise Conflict(f"{backup / FILE_LIST} is damaged.") from error


def order(path: str) -> tuple[str, ...]:
    """Return the key by which files are listed: a directory before what follows its name."""
    return tuple(path.split("/"))
