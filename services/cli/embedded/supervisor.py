"""The parts of an embedded platform: one that ends by itself is started again after a pause."""

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

_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_HEALTHY_SECONDS = 60.0  # a part that lived so long starts its back-off anew

Say = Callable[[str], None]


@dataclass(kw_only=True)
class Part(ABC):
    """A process of the platform, and when to start it again."""

    name: str
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    pause: float = _FIRST_PAUSE
    longest_pause: float = _LONGEST_PAUSE
    start_at: float | None = None  # when to start it again; None while it runs

    def start(self) -> None:
        """Start the process; it dies with us. A server is ready when this returns.

        Raises StartFailed where a server does not come up.
        """
        self.process = self._begin()
        self.started_at = time.monotonic()
        self.start_at = None

    @abstractmethod
    def _begin(self) -> subprocess.Popen[bytes]:
        """Return the started process."""

    @abstractmethod
    def stop(self) -> None:
        """Stop the process in good order, with everything below it."""

    def look_after(self, say: Say) -> None:
        """Report an end, and start again after a pause that grows with each early one."""
        if self.process is None or (self.start_at is None and self.process.poll() is None):
            return
        if self.start_at is None:
            self._wait_longer()
            say(
                f"{self.name} ended with code {self.process.returncode}; it starts again in "
                f"{self.pause:.0f} s. Its last words ({self.log}):\n{log_tail(self.log)}"
            )
        elif time.monotonic() >= self.start_at:
            try:
                self.start()
            except StartFailed as error:
                self._wait_longer()
                say(f"{self.name} did not start; next try in {self.pause:.0f} s: {error}")
                return
            say(f"{self.name} runs again (pid {self.process.pid})")

    def _wait_longer(self) -> None:
        now = time.monotonic()
        lived = now - self.started_at if self.start_at is None else 0.0
        self.pause = _FIRST_PAUSE if lived > _HEALTHY_SECONDS else self.pause * 2
        self.pause = min(self.pause, self.longest_pause)
        self.start_at = now + self.pause


@dataclass(kw_only=True)
class Service(Part):
    """One of our own processes: a module that is run."""

    module: str
    env: dict[str, str]
    stop_seconds: float
    is_ready: Callable[[], bool]

    def _begin(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", self.module]
        return start_process(command, log=self.log, env=self.env, cwd=project_dir())

    def stop(self) -> None:
        if self.process is not None:
            stop_process(self.process, grace_seconds=self.stop_seconds)


@dataclass(kw_only=True)
class Backend(Part):
    """Postgres or Valkey. Started again, it goes on with its data under the same URL."""

    open: Callable[[], Server]
    server: Server | None = None

    def _begin(self) -> subprocess.Popen[bytes]:
        self.server = self.open()
        return self.server.process

    def stop(self) -> None:
        if self.server is not None:
            self.server.stop()

    @property
    def url(self) -> str:
        """The URL that clients use. Only after the first start."""
        assert self.server is not None
        return self.server.url


def project_dir() -> Path:
    """Return the directory from which `services` imports, for a checkout that is not installed."""
    return Path(__file__).resolve().parents[3]
