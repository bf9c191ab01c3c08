"""Reports of a worker: that it runs, and what the doctor finds on its machine."""

from __future__ import annotations

import os
import time
from contextlib import suppress

import structlog

from services.shared.jobs.settings import JobSettings
from services.shared.jobs.worker_reports import (
    WorkerCheck,
    WorkerReport,
    remove_worker_report,
    write_worker_report,
)
from services.shared.launch.doctor.doctor import examine, to_json
from services.shared.launch.doctor.machine import Machine

log = structlog.get_logger(__name__)

_EXAMINED_SECONDS = 3600.0  # how long the doctor's findings are taken for current


class WorkerReporter:
    """Keeps the report of one worker current; a failure to write it is logged and harmless."""

    def __init__(self, settings: JobSettings, *, name: str, kind: str) -> None:
        self._settings = settings
        now = time.time()
        self._report = WorkerReport(
            name=name, kind=kind, pid=os.getpid(), started_at=now, seen_at=now
        )

    def write(self) -> None:
        """Say that the worker runs; examine its machine where that was long ago."""
        now = time.time()
        update: dict[str, object] = {"seen_at": now}
        examined_at = self._report.examined_at
        if examined_at is None or now - examined_at > _EXAMINED_SECONDS:
            update |= self._examine(now)
        self._report = self._report.model_copy(update=update)
        try:
            write_worker_report(self._settings, self._report)
        except OSError as error:
            log.warning("worker_report_not_written", error=str(error))

    def remove(self) -> None:
        """Say that the worker ends."""
        with suppress(OSError):
            remove_worker_report(self._settings, self._report.name)

    def _examine(self, now: float) -> dict[str, object]:
        machine = Machine.detect()
        findings, measured = examine(machine, with_torch=False)
        document = to_json(machine, findings, measured)
        return {
            "examined_at": now,
            "device_kind": document["device_kind"],
            "healthy": document["healthy"],
            "checks": [WorkerCheck(**check) for check in document["checks"]],
        }
