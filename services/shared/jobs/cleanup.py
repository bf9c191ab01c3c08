"""Removes files that killed processes have left; an artifact may have 64 GB.

Artifacts are moved to quarantine/<date>/ first and removed QUARANTINE_DAYS later: where the database was
restored from a backup older than the files, a finished model looks like one without a row.

models/mdl_<job>_<attempt>     renamed into place by a worker that was killed before its row
runs/<job>/<attempt>/checkpoints   of a job that succeeded while its worker was killed
datasets/.<id>.<pid>.partial   of an upload whose API was killed
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import structlog

from services.shared.files.atomic_write import PARTIAL
from services.shared.jobs.db.store import Store
from services.shared.jobs.run_directory import RunDirectory

log = structlog.get_logger(__name__)

_MODEL = re.compile(r"mdl_([0-9a-z]+)_(\d+)")
# An upload takes minutes; the process of a temporary directory this old has ended.
_UPLOAD_SECONDS = 24 * 3600.0
QUARANTINE_DAYS = 7


def remove_leftovers(store: Store) -> list[Path]:
    """Remove what no row and no running attempt needs, artifacts by quarantine; return the paths.

    Safe to run concurrently, and while workers run: directories are listed before the database is
    queried, so an artifact whose row is being written belongs to an attempt that still runs. Artifacts of jobs that
    are not in this database are kept. Raises Unavailable.
    """
    settings = store.settings
    models = _models(store, _names(settings.models_dir))
    found = [
        *_checkpoints(store, _names(settings.runs_dir)),
        *_uploads(settings.datasets_dir),
        *_expired(settings.quarantine_dir),
    ]
    for path in models:
        _quarantine(path, settings.quarantine_dir)
    for path in found:
        log.info("leftover_removed", path=str(path))
        shutil.rmtree(path, ignore_errors=True)
    return [*models, *found]


def _quarantine(path: Path, quarantine_dir: Path) -> None:
    """Move an artifact out of the models, unless another worker has done so."""
    target = quarantine_dir / _today().isoformat() / path.name
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.rename(target)
    except OSError as error:
        log.warning("quarantine_failed", path=str(path), error=str(error))
    else:
        log.warning("model_quarantined", path=str(path), moved_to=str(target))


def _expired(quarantine_dir: Path) -> Iterable[Path]:
    for name in _names(quarantine_dir):
        try:
            moved_on = date.fromisoformat(name)
        except ValueError:
            continue
        if _today() - moved_on > timedelta(days=QUARANTINE_DAYS):
            yield quarantine_dir / name


def _today() -> date:
    return datetime.now(timezone.utc).date()


def _models(store: Store, names: list[str]) -> list[Path]:
    attempts = {
        (f"job_{match[1]}", int(match[2])): name
        for name in names
        if (match := _MODEL.fullmatch(name))
    }
    needless = store.attempts_without_result(list(attempts))
    return [store.settings.model_dir(attempts[attempt]) for attempt in needless]


def _checkpoints(store: Store, names: list[str]) -> Iterable[Path]:
    """Yield the checkpoints of jobs that have their model."""
    kept: dict[str, list[Path]] = {}
    for job_id in names:
        runs = store.settings.runs_dir / job_id
        paths = [RunDirectory(runs / attempt).checkpoints for attempt in _names(runs)]
        kept[job_id] = [path for path in paths if path.is_dir()]
    holding = [job_id for job_id, paths in kept.items() if paths]
    for job_id in store.succeeded_among(holding):
        yield from kept[job_id]


def _uploads(datasets_dir: Path) -> Iterable[Path]:
    before = time.time() - _UPLOAD_SECONDS
    for path in datasets_dir.glob(f".ds_*{PARTIAL}"):
        try:
            if path.stat().st_mtime < before:
                yield path
        except FileNotFoundError:
            continue


def _names(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in directory.iterdir() if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
