"""Directories of models and checkpoints; paths that lead outside the model roots are refused."""

from __future__ import annotations

import re
from pathlib import Path

from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.run_directory import COMPLETE, RunDirectory
from services.shared.jobs.settings import JobSettings

_JOB_ID = re.compile(r"job_[0-9a-z]{1,60}")


def resolve_model(path: str, *, roots: list[Path], field: str) -> Path:
    """Return the real directory that a spec's model path names, below one of the model roots.

    A relative path is tried below each root in turn. Links are resolved before the comparison, so
    neither `..` nor a link leads outside. Raises InvalidRequest naming the field.
    """
    real_roots = [root.resolve() for root in roots]
    for root in real_roots:
        candidate = _real_directory(root / path)  # an absolute path replaces the root
        if candidate and any(candidate.is_relative_to(real) for real in real_roots):
            return candidate
    where = ", ".join(str(root) for root in roots) or "none is set (STILLHOUSE_MODEL_ROOTS)"
    raise InvalidRequest(
        f"{field}: there is no directory {path[:200]!r} below the model roots of this server ({where})",
        field=field,
    )


def latest_checkpoints(settings: JobSettings, attempts: list[tuple[str, int]]) -> Path | None:
    """Return the checkpoints directory of the first of (job id, attempt) with one to resume from.

    Best weights alone (best-*) are none: an attempt that kept some and was then killed has read its
    step from an earlier attempt's checkpoint.
    """
    for job_id, attempt in attempts:
        checkpoints = RunDirectory(settings.run_dir(job_id, attempt)).checkpoints
        if any(checkpoints.glob(f"step-*/{COMPLETE}")):
            return checkpoints
    return None


def highest_attempt(settings: JobSettings, job_id: str) -> int:
    """Return the highest number of an attempt of a job that has a run directory, or 0."""
    if not _JOB_ID.fullmatch(job_id):  # a message may hold anything; only our ids name directories
        return 0
    try:
        names = [entry.name for entry in (settings.runs_dir / job_id).iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return 0
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _real_directory(path: Path) -> Path | None:
    try:
        real = path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError):  # absent, too long, with a NUL, a loop of links
        return None
    return real if real.is_dir() else None
