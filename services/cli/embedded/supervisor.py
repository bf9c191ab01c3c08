"""The components of an embedded platform; one that exits is restarted after a back-off."""

from __future__ import annotations

import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.cli.embedded.servers import Server, StartFailed, log_tail
from services.shared.launch.processes import start_process, stop_process

_INITIAL_BACKOFF_SECONDS = 1.0
_MAX_BACKOFF_SECONDS = 30.0
_HEALTHY_SECONDS = 60.0  # a component that ran longer starts again with the initial back-off

Notify = Callable[[str], None]


@dataclass(kw_only=True)
class Component(ABC):
    """A process of the platform, and when to restart it."""

    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    backoff_seconds: float = _INITIAL_BACKOFF_SECONDS
    max_backoff_seconds: float = _MAX_BACKOFF_SECONDS
    restart_at: float | None = None  # monotonic time; None while the process runs

    def start(self) -> None:
        """Start the process, which ends when this process does; a backend is ready on return.

        Raises StartFailed where a backend does not start.
        """
        self.process = self._spawn()
        self.started_at = time.monotonic()
        self.restart_at = None

    @abstractmethod
    def _spawn(self) -> subprocess.Popen[bytes]:
        """Return the started process."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the process gracefully, with all of its descendants."""

    @property
    def is_running(self) -> bool:
        """Whether the process runs; False while it waits for its restart."""
        return self.restart_at is None and self.process is not None and self.process.poll() is None

    def restart_if_exited(self, notify: Notify) -> None:
        """Report an exit, and restart after a back-off that doubles with each early exit."""
        if self.process is None or self.is_running:
            return
        if self.restart_at is None:
            self._back_off()
            notify(
                f"{self.name} exited with code {self.process.returncode}; restarting in "
                f"{self.backoff_seconds:.0f} s. End of {self.log}:\n{log_tail(self.log)}"
            )
        elif time.monotonic() >= self.restart_at:
            try:
                self.start()
            except StartFailed as error:
                self._back_off()
                notify(
                    f"{self.name} did not start; retrying in {self.backoff_seconds:.0f} s: {error}"
                )
                return
            notify(f"{self.name} restarted (pid {self.process.pid})")

    def _back_off(self) -> None:
        now = time.monotonic()
        uptime = now - self.started_at if self.restart_at is None else 0.0
        doubled = min(self.backoff_seconds * 2, self.max_backoff_seconds)
        initial = min(_INITIAL_BACKOFF_SECONDS, self.max_backoff_seconds)
        self.backoff_seconds = initial if uptime > _HEALTHY_SECONDS else doubled
        self.restart_at = now + self.backoff_seconds


@dataclass(kw_only=True)
class Service(Component):
    """One of the platform's own processes, run as a Python module."""

    module: str
    env: dict[str, str]
    stop_seconds: float
    is_ready: Callable[[], bool]

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", self.module]
        return start_process(command, log=self.log, env=self.env, cwd=project_dir())

    def stop(self) -> None:
        if self.process is not None:
            stop_process(self.process, grace_seconds=self.stop_seconds)


@dataclass(kw_only=True)
class Backend(Component):
    """Postgres or Valkey; a restart keeps its data and its URL."""

    start_server: Callable[[], Server]
    server: Server | None = None

    def _spawn(self) -> subprocess.Popen[bytes]:
        self.server = self.start_server()
        return self.server.process

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()

    @property
    def url(self) -> str:
        """The URL that clients use; only after the first start."""
        assert self.server is not None
        return self.server.url


def project_dir() -> Path:
    """Return the directory from which `services` can be imported, for a checkout that is not installed."""
    return Path(__file__).resolve().parents[3]
