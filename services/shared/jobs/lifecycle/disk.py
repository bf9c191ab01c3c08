"""How full the file systems of the data directory are."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from services.shared.jobs.settings import JobSettings


@dataclass(frozen=True)
class DiskUse:
    """The use of the file system of a directory, of what an ordinary user may fill."""

    path: Path
    total_bytes: int
    used_bytes: int

    @property
    def share(self) -> float:
        return self.used_bytes / self.total_bytes if self.total_bytes else 0.0


def disk_use(path: Path) -> DiskUse:
    """Return the use of the file system that holds a path, or will. Raises OSError."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    stats = os.statvfs(place)
    used = (stats.f_blocks - stats.f_bfree) * stats.f_frsize
    return DiskUse(path, used + stats.f_bavail * stats.f_frsize, used)


def fullest(paths: Iterable[Path]) -> DiskUse:
    """Return the use of the fullest of several file systems. Raises OSError."""
    return max(map(disk_use, paths), key=lambda use: use.share)


def full_disk_for_jobs(settings: JobSettings) -> str | None:
    """Return why no job may start now: a disk that it writes to is too full; None if there is room."""
    return _too_full(settings, (settings.runs_dir, settings.models_dir, settings.signals_dir))


def full_disk_for_uploads(settings: JobSettings) -> str | None:
    """Return why no upload is accepted now, or None."""
    return _too_full(settings, (settings.datasets_dir, settings.data_dir))


def _too_full(settings: JobSettings, paths: Iterable[Path]) -> str | None:
    use = fullest(paths)
    limit = settings.disk_full_share
    if use.share < limit:
        return None
    return (
        f"the disk of the {use.path.name} directory is {use.share:.1%} full, and from {limit:.0%} "
        "(STILLHOUSE_DISK_FULL_SHARE) nothing is added: delete jobs, models or datasets, run "
        "`stillhouse gc`, or add space"
    )
