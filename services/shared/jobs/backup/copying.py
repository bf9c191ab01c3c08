"""Copies the files of a backup, and links those that are the same as in the backup before."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from services.shared.files.atomic_write import PARTIAL
from services.shared.jobs.backup.layout import FILE_LIST, FILES, FileRecord, order, read_files
from services.shared.jobs.db.snapshot.dump import table_file
from services.shared.jobs.run_directory import COMPLETE

_BLOCK_BYTES = 1 << 20
_CHECKPOINTS = "checkpoints"
# Of a run directory: written for processes that are gone when it is restored.
_LEFT_OUT = frozenset({"heartbeat.json", "stop.json", "export"})


@dataclass
class CopyCounts:
    """How much a backup holds, and how much of it was copied."""

    num_files: int = 0
    num_bytes: int = 0
    num_copied_files: int = 0
    num_copied_bytes: int = 0


def listed_ids(tables: Path, table: str) -> Iterator[str]:
    """Yield the ids of the rows of a dumped table, in order: the first of their columns."""
    with gzip.open(table_file(tables, table), "rt", encoding="utf-8") as rows:
        for row in rows:
            yield row.rstrip("\n").partition("\t")[0]


def copy_files(data_dir: Path, backup: Path, *, tables: Path, before: Path | None) -> CopyCounts:
    """Copy the files of every dumped row below `backup`, and write their list. Raises OSError."""
    counts = CopyCounts()
    former = _FormerFiles(before)
    with (backup / FILE_LIST).open("w", encoding="utf-8") as listing:
        for root in ("datasets", "models", "runs"):
            table = "jobs" if root == "runs" else root
            for id in listed_ids(tables, table):
                for path in _files_of(data_dir / root / id):
                    record = _copy(data_dir, path, backup, former, counts)
                    if record is not None:
                        listing.write(record.model_dump_json() + "\n")
        listing.flush()
        os.fsync(listing.fileno())
    return counts


def _files_of(directory: Path) -> Iterator[Path]:
    """Yield the files below a directory in order, without what is being written."""
    try:
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.name.endswith(PARTIAL) or entry.name in _LEFT_OUT:
            continue
        path = Path(entry.path)
        if entry.is_file(follow_symlinks=False):
            yield path
        elif entry.is_dir(follow_symlinks=False) and _is_whole(path):
            yield from _files_of(path)


def _is_whole(directory: Path) -> bool:
    """Return whether a directory is complete: a checkpoint that is being written or removed is not."""
    return directory.parent.name != _CHECKPOINTS or (directory / COMPLETE).exists()


def _copy(
    data_dir: Path, path: Path, backup: Path, former: _FormerFiles, counts: CopyCounts
) -> FileRecord | None:
    """Copy or link one file; None for one that was removed meanwhile."""
    name = path.relative_to(data_dir).as_posix()
    target = backup / FILES / name
    try:
        stat = path.stat()
        known = former.find(name)
        target.parent.mkdir(parents=True, exist_ok=True)
        if known is not None and (known.size, known.mtime_ns) == (stat.st_size, stat.st_mtime_ns):
            record = known
            _link(former.path_of(known), target)
        else:
            sha256, size = _copy_content(path, target)
            record = FileRecord(path=name, size=size, mtime_ns=stat.st_mtime_ns, sha256=sha256)
            counts.num_copied_files += 1
            counts.num_copied_bytes += size
    except FileNotFoundError:
        return None
    counts.num_files += 1
    counts.num_bytes += record.size
    return record


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        _copy_content(source, target)


def _copy_content(source: Path, target: Path) -> tuple[str, int]:
    """Copy what the file holds now; return its SHA-256 and size. A log may grow meanwhile."""
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reader, target.open("wb") as writer:
        remaining = os.fstat(reader.fileno()).st_size
        while remaining and (block := reader.read(min(_BLOCK_BYTES, remaining))):
            digest.update(block)
            writer.write(block)
            size += len(block)
            remaining -= len(block)
    with contextlib.suppress(OSError):
        stat = source.stat()
        os.utime(target, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return digest.hexdigest(), size


class _FormerFiles:
    """The files of the backup before, read along in the same order."""

    def __init__(self, backup: Path | None) -> None:
        self._backup = backup
        self._records = iter(()) if backup is None else read_files(backup)
        self._next: FileRecord | None = next(self._records, None)

    def find(self, path: str) -> FileRecord | None:
        """Return the record of a path; paths are asked for in order."""
        wanted = order(path)
        while self._next is not None and order(self._next.path) < wanted:
            self._next = next(self._records, None)
        return self._next if self._next is not None and self._next.path == path else None

    def path_of(self, record: FileRecord) -> Path:
        """Return where the backup before holds a file."""
        assert self._backup is not None
        return self._backup / FILES / record.path
