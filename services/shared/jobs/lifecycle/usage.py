"""What is stored by kind of file, and when the disk will be full at the measured growth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from services.shared.files.directory_size import directory_bytes
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.usage_queries import UsageSample
from services.shared.jobs.lifecycle.disk import disk_use
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.settings import JobSettings

SAMPLE_DAYS = 60  # samples are kept
FORECAST_DAYS = 7  # the growth is measured over
_LEAST_SPAN = timedelta(hours=1)
_DAY_SECONDS = 86_400.0


@dataclass(frozen=True)
class Forecast:
    """The growth of the use of the disk; `days_until_full` is None where it does not grow."""

    bytes_per_day: float
    days_until_full: float | None


def sample_usage(lifecycle: LifecycleStore) -> None:
    """Measure everything below the data directory and store the sample. Raises Unavailable, OSError."""
    use = disk_use(lifecycle.settings.data_dir)
    lifecycle.add_usage_sample(
        total_bytes=use.total_bytes,
        used_bytes=use.used_bytes,
        stored_bytes=measure(lifecycle.settings),
        keep=timedelta(days=SAMPLE_DAYS),
    )


def measure(settings: JobSettings) -> dict[str, int]:
    """Return the bytes of each kind of file below the data directory."""
    plain = {
        "datasets": settings.datasets_dir,
        "models": settings.models_dir,
        "signals": settings.signals_dir,
        "quarantine": settings.quarantine_dir,
        "uploads": settings.data_dir / "uploads",
    }
    found = {kind: directory_bytes(path) for kind, path in plain.items()}
    runs = dict.fromkeys(("checkpoints", "logs", "metrics", "runs"), 0)
    for path in _run_directories(settings.runs_dir):
        run = RunDirectory(path)
        parts = {
            "checkpoints": directory_bytes(run.checkpoints),
            "logs": sum(map(_size, log_files(run))),
            "metrics": sum(map(_size, series_files(run))),
        }
        for kind, size in parts.items():
            runs[kind] += size
        runs["runs"] += directory_bytes(path) - sum(parts.values())
    return found | runs


def log_files(run: RunDirectory) -> list[Path]:
    """Return the logs of an attempt that exist."""
    return [path for path in (run.log,) if path.exists()]


def series_files(run: RunDirectory) -> list[Path]:
    """Return the series of progress and memory of an attempt that exist."""
    paths = [run.progress, *(run.memory_file(rank) for rank in run.ranks())]
    return [path for path in paths if path.exists()]


def forecast(samples: Sequence[UsageSample], *, full_share: float) -> Forecast | None:
    """Return the growth by least squares over samples in order; None where they span too little."""
    if len(samples) < 2 or samples[-1].taken_at - samples[0].taken_at < _LEAST_SPAN:
        return None
    start = samples[0].taken_at
    days = [(s.taken_at - start).total_seconds() / _DAY_SECONDS for s in samples]
    used = [float(s.disk_used_bytes) for s in samples]
    mean_day, mean_used = sum(days) / len(days), sum(used) / len(used)
    spread = sum((day - mean_day) ** 2 for day in days)
    growth = sum((d - mean_day) * (u - mean_used) for d, u in zip(days, used, strict=True)) / spread
    last = samples[-1]
    room = max(0.0, full_share * last.disk_total_bytes - last.disk_used_bytes)
    return Forecast(growth, room / growth if growth > 0 else None)


def _run_directories(runs_dir: Path) -> Iterator[Path]:
    for job in _directories(runs_dir):
        yield from _directories(job)


def _directories(path: Path) -> list[Path]:
    try:
        return [entry for entry in path.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
