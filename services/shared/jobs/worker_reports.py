"""What each worker reports of itself: `<data>/workers/<name>.json`, written by it, read by the API.

name, kind, pid, started_at      who it is
seen_at                          renewed with every sweep; a worker that is silent for long is not shown
examined_at, healthy, checks     what `doctor` found on its machine, without the checks that need torch:
                                 those would take memory of the devices on which a job may be running
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from services.shared.jobs.run_directory import read_record, write_json
from services.shared.jobs.settings import JobSettings

_SILENT_SWEEPS = 6  # after which a worker is not shown
_FORGOTTEN_SECONDS = 24 * 3600.0


class WorkerCheck(BaseModel):
    """One finding of the doctor."""

    name: str
    status: str  # ok, warning, failed, not_applicable
    detail: str
    remedy: str


class WorkerReport(BaseModel):
    """One worker and its machine; times are seconds since the epoch."""

    model_config = ConfigDict(extra="allow")

    name: str
    kind: str  # its queue: trainer or distiller
    pid: int
    started_at: float
    seen_at: float
    device_kind: str | None = None
    healthy: bool | None = None  # None until it was examined
    examined_at: float | None = None
    checks: list[WorkerCheck] = []


def write_worker_report(settings: JobSettings, report: WorkerReport) -> None:
    """Write the report of a worker. Raises OSError."""
    write_json(_file(settings, report.name), report)


def remove_worker_report(settings: JobSettings, name: str) -> None:
    """Remove the report of a worker that ends. Raises OSError."""
    _file(settings, name).unlink(missing_ok=True)


def read_worker_reports(settings: JobSettings) -> list[WorkerReport]:
    """Return the reports of the workers that run, by name; forget those that were silent for a day."""
    found = []
    now = time.time()
    for path in sorted((settings.data_dir / "workers").glob("*.json")):
        report = read_record(path, WorkerReport)
        if report is None:
            continue
        silent_seconds = now - report.seen_at
        if silent_seconds > _FORGOTTEN_SECONDS:
            path.unlink(missing_ok=True)
        elif silent_seconds <= _SILENT_SWEEPS * settings.sweep_seconds:
            found.append(report)
    return found


def _file(settings: JobSettings, name: str) -> Path:
    safe = re.sub(r"[^A-Za-z0-9_.-]", "_", name)
    return settings.data_dir / "workers" / f"{safe}.json"
