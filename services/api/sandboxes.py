"""The processes in which the API calculates plans and diagnoses, and reads uploads."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from services.api.settings import ApiSettings
from services.shared.datasets.formats.compression import MAX_UNPACKED_BYTES
from services.shared.sandbox.errors import SandboxFailed
from services.shared.sandbox.fork_server import ForkServer
from services.shared.sandbox.limits import Limits
from services.shared.sandbox.sandbox import Sandbox

# A process gets this many times its CPU time, of a machine that does other things too.
_PATIENCE = 3.0
_MAX_CALCULATIONS = 8  # each blocks a thread of a route, of which there are 40


@dataclass(frozen=True)
class Sandboxes:
    """Both sandboxes of an API process."""

    calculations: Sandbox
    validations: Sandbox

    def start(self) -> None:
        """Start their fork servers in the background, so that the first request need not wait."""
        for sandbox in (self.calculations, self.validations):
            threading.Thread(target=_start, args=[sandbox], daemon=True).start()

    def close(self) -> None:
        """End both, with the calls in progress."""
        for sandbox in (self.calculations, self.validations):
            sandbox.server.close()


def create_sandboxes(settings: ApiSettings) -> Sandboxes:
    """Return sandboxes with the limits of the settings; they start with their first call."""
    calculations = Sandbox(
        ForkServer(
            ["services.shared.jobs.planning.calculations", "services.shared.jobs.supply.check"]
        ),
        limits=Limits(
            seconds=settings.calculation_seconds,
            wall_seconds=settings.calculation_seconds * _PATIENCE,
            memory_bytes=settings.calculation_memory_bytes,
        ),
        max_running=min(os.cpu_count() or 1, _MAX_CALCULATIONS),
    )
    validations = Sandbox(
        ForkServer(["services.shared.datasets.sandbox"]),
        limits=Limits(
            seconds=settings.validation_seconds,
            wall_seconds=settings.validation_seconds * _PATIENCE,
            memory_bytes=settings.validation_memory_bytes,
            file_bytes=MAX_UNPACKED_BYTES,
        ),
        max_running=settings.validations_at_once,
        max_waiting=settings.uploads_at_once,
    )
    return Sandboxes(calculations, validations)


def _start(sandbox: Sandbox) -> None:
    try:
        sandbox.server.start()
    except SandboxFailed:
        return  # the first call tries again, and reports it
