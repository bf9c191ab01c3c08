"""What retention removes, and what was deleted longer ago than the grace period.

`find` looks and `remove` acts on what it found, so that a dry run shows exactly what a real one does.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal

import structlog

from services.shared.files.directory_size import directory_bytes
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.retention_queries import Kept
from services.shared.jobs.errors import InUse, NotFound
from services.shared.jobs.lifecycle.usage import log_files, series_files
from services.shared.jobs.retention import Period
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.views import Resource

log = structlog.get_logger(__name__)

BY = "retention"  # who deletes what retention deletes
_PAGE = 500

What = Literal[
    "checkpoints", "logs", "metrics", "signals", "events", "failed_runs", "finished_runs",
    "unpromoted_models", "superseded_models", "deleted_datasets", "deleted_jobs", "deleted_models",
]  # fmt: skip


@dataclass(frozen=True)
class Removal:
    """One thing to remove: files, the events of a job, or a job or model to be deleted."""

    what: What
    id: str  # of the job, model or dataset; the name of a file of signals
    size_bytes: int = 0
    paths: tuple[Path, ...] = ()


def find(lifecycle: LifecycleStore, *, now: datetime) -> Iterator[Removal]:
    """Yield everything that is to be removed at a moment. Raises Unavailable."""
    yield from _expired_files(lifecycle, now)
    yield from _expired_signals(lifecycle.settings, now)
    yield from _expired_events(lifecycle, now)
    yield from _expired_jobs(lifecycle, now)
    yield from _models(lifecycle, now)
    yield from _deleted(lifecycle, now)


def remove(lifecycle: LifecycleStore, removal: Removal, *, now: datetime) -> None:
    """Remove one thing that was found; what refers to it meanwhile keeps it. Raises Unavailable."""
    log.info("retention_removes", what=removal.what, id=removal.id, size_bytes=removal.size_bytes)
    try:
        match removal.what:
            case "events":
                lifecycle.delete_events([removal.id])
            case "failed_runs" | "finished_runs":
                lifecycle.delete("job", removal.id, by=BY)
            case "unpromoted_models" | "superseded_models":
                lifecycle.delete("model", removal.id, by=BY)
            case "checkpoints" | "logs" | "metrics" | "signals":
                _remove_paths(removal.paths)
            case what:
                if lifecycle.purge(_RESOURCES[what], removal.id, now=now):
                    _remove_paths(removal.paths)
    except (InUse, NotFound) as kept:
        log.info("retention_keeps", what=removal.what, id=removal.id, why=str(kept))


def _remove_paths(paths: tuple[Path, ...]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _expired_files(lifecycle: LifecycleStore, now: datetime) -> Iterator[Removal]:
    """Yield checkpoints, logs and series of jobs that ended long enough ago."""
    runs_dir = lifecycle.settings.runs_dir
    names = _names(runs_dir)
    for start in range(0, len(names), _PAGE):
        for job in lifecycle.ended_among(names[start : start + _PAGE]):
            runs = [RunDirectory(runs_dir / job.id / name) for name in _names(runs_dir / job.id)]
            for what, period, files_of in _FILES:
                if _is_over(lifecycle.settings, period, job, now):
                    paths = tuple(path for run in runs for path in files_of(run))
                    if paths:
                        yield Removal(what, job.id, sum(map(_size, paths)), paths)


_FILES: tuple[tuple[What, Period, Callable[[RunDirectory], list[Path]]], ...] = (
    (
        "checkpoints",
        "checkpoints_days",
        lambda run: [run.checkpoints] if run.checkpoints.is_dir() else [],
    ),
    ("logs", "logs_days", log_files),
    ("metrics", "metrics_days", series_files),
)


def _expired_signals(settings: JobSettings, now: datetime) -> Iterator[Removal]:
    days = settings.retention.signals_days
    if days is None:
        return
    before = (now - timedelta(days=days)).timestamp()
    for path in sorted(settings.signals_dir.glob("*.safetensors")):
        if path.stat().st_mtime < before:
            yield Removal("signals", path.name, _size(path), (path,))


def _expired_events(lifecycle: LifecycleStore, now: datetime) -> Iterator[Removal]:
    for job in _ended(lifecycle, now, "events_days", with_events=True):
        yield Removal("events", job.id)


def _expired_jobs(lifecycle: LifecycleStore, now: datetime) -> Iterator[Removal]:
    runs_dir = lifecycle.settings.runs_dir
    periods: tuple[tuple[What, Period, bool], ...] = (
        ("failed_runs", "failed_runs_days", False),
        ("finished_runs", "finished_runs_days", True),
    )
    for what, period, succeeded in periods:
        for job in _ended(lifecycle, now, period, with_events=False):
            if job.succeeded == succeeded:
                yield Removal(what, job.id, directory_bytes(runs_dir / job.id))


def _ended(
    lifecycle: LifecycleStore, now: datetime, period: Period, *, with_events: bool
) -> Iterator[Kept]:
    days = lifecycle.settings.retention.shortest(period)
    if days is None:
        return
    before, after = now - timedelta(days=days), ""
    while page := lifecycle.ended_before(before, with_events=with_events, after=after, limit=_PAGE):
        yield from (job for job in page if _is_over(lifecycle.settings, period, job, now))
        after = page[-1].id


def _models(lifecycle: LifecycleStore, now: datetime) -> Iterator[Removal]:
    """Yield models that nobody promoted, or that serve no more, after their periods."""
    settings = lifecycle.settings
    kinds: tuple[tuple[What, Period, Callable[..., list[Kept]]], ...] = (
        ("unpromoted_models", "unpromoted_models_days", lifecycle.unpromoted_before),
        ("superseded_models", "superseded_models_days", lifecycle.superseded_before),
    )
    for what, period, page_before in kinds:
        days = settings.retention.shortest(period)
        after = ""
        while days is not None:
            page = page_before(now - timedelta(days=days), after=after, limit=_PAGE)
            for model in page:
                if _is_over(settings, period, model, now):
                    yield Removal(what, model.id, directory_bytes(settings.model_dir(model.id)))
            if not page:
                break
            after = page[-1].id


def _is_over(settings: JobSettings, period: Period, kept: Kept, now: datetime) -> bool:
    days = settings.retention.days(period, kind=kept.kind, tags=kept.tags)
    return days is not None and now - kept.since > timedelta(days=days)


def _deleted(lifecycle: LifecycleStore, now: datetime) -> Iterator[Removal]:
    """Yield the files of what was deleted longer ago than the grace period."""
    for what, resource in _RESOURCES.items():
        root = _root(lifecycle.settings, resource)
        for id in _due(lifecycle, resource, root, now):
            yield Removal(what, id, directory_bytes(root / id), (root / id,))


# What refers to others comes first.
_RESOURCES: dict[What, Resource] = {
    "deleted_models": "model",
    "deleted_jobs": "job",
    "deleted_datasets": "dataset",
}


def _due(lifecycle: LifecycleStore, resource: Resource, root: Path, now: datetime) -> Iterator[str]:
    names = _names(root)
    for start in range(0, len(names), _PAGE):  # left by a process that was killed meanwhile
        yield from lifecycle.purged_among(resource, names[start : start + _PAGE])
    after = ""
    while page := lifecycle.due(resource, now=now, after=after, limit=_PAGE):
        yield from page
        after = page[-1]


def _root(settings: JobSettings, resource: Resource) -> Path:
    """Return the directory with a directory for each resource of a kind; of a job, its attempts."""
    roots = {
        "dataset": settings.datasets_dir,
        "job": settings.runs_dir,
        "model": settings.models_dir,
    }
    return roots[resource]


def _size(path: Path) -> int:
    return directory_bytes(path) if path.is_dir() else path.stat().st_size


def _names(directory: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in directory.iterdir() if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
