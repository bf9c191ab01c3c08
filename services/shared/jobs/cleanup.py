"""Removes files that killed processes have left; an artifact may have 64 GB.

models/mdl_<job>_<attempt>     renamed into place by a worker that was killed before its row
runs/<job>/<attempt>/checkpoints   of a job that succeeded while its worker was killed
datasets/.<id>.<pid>.partial   of an upload whose API was killed
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

import structlog

from services.shared.files.atomic_write import PARTIAL
from services.shared.jobs.db.store import Store
from services.shared.jobs.run_directory import RunDirectory

log = structlog.get_logger(__name__)

_MODEL = re.compile(r"mdl_([0-9a-z]+)_(\d+)")
# An upload takes minutes; the process of a temporary directory this old has ended.
_UPLOAD_SECONDS = 24 * 3600.0


def remove_leftovers(store: Store) -> list[Path]:
    """Remove what no row and no running attempt needs; return the paths.

    Safe to run concurrently, and while workers run: directories are listed before the database is
    queried, so an artifact whose row is being written belongs to an attempt that still runs. Artifacts of jobs that
    are not in this database are kept. Raises Unavailable.
    """
    settings = store.settings
    found = [
        *_models(store, _names(settings.models_dir)),
        *_checkpoints(store, _names(settings.runs_dir)),
        *_uploads(settings.datasets_dir),
    ]
    for path in found:
        log.info("leftover_removed", path=str(path))
        shutil.rmtree(path, ignore_errors=True)
    return found


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
