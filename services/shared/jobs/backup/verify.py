"""Compares a backup with the hashes that were recorded when it was made."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path

from services.shared.files.hashing import file_sha256
from services.shared.jobs.backup.layout import (
    FILE_LIST,
    FILES,
    TABLES,
    BackupRecord,
    read_files,
    read_record,
)
from services.shared.jobs.db.snapshot.dump import table_file
from services.shared.jobs.errors import Conflict

_READ_BYTES = 1 << 20


def verify_backup(backup: Path) -> BackupRecord:
    """Return the record of a backup that is intact. Raises Conflict naming the first difference, OSError."""
    record = read_record(backup)
    for fault in _faults(backup, record):
        raise Conflict(f"The backup {backup} is damaged: {fault}.")
    return record


def _faults(backup: Path, record: BackupRecord) -> Iterator[str]:
    for table in record.tables:
        if _rows_sha256(table_file(backup / TABLES, table.name)) != table.sha256:
            yield f"the rows of {table.name} do not match their hash"
    if file_sha256(backup / FILE_LIST) != record.files_sha256:
        yield "the list of files does not match its hash"
    for file in read_files(backup):
        path = backup / FILES / file.path
        if not path.is_file():
            yield f"{file.path} is missing"
        elif file_sha256(path) != file.sha256:
            yield f"{file.path} does not match its hash"


def _rows_sha256(path: Path) -> str | None:
    digest = hashlib.sha256()
    try:
        with gzip.open(path, "rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    except (OSError, EOFError, zlib.error):
        return None
    return digest.hexdigest()
