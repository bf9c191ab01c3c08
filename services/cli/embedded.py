"""The whole platform as child processes of one: servers, migrations, API, a worker for each queue."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from services.cli.servers import StartFailed, log_tail, start_postgres, start_valkey
from services.shared.launch.processes import start_process, stop_process

_START_SECONDS = 120.0  # the API loads torch: 3 to 8 s, much longer from a cold or shared disk
_FIRST_PAUSE = 1.0
_LONGEST_PAUSE = 30.0
_HEALTHY_SECONDS = 60.0  # a part that lived so long starts its back-off anew
_API_STOP_SECONDS = 15.0
# Ranks save before they leave; Ctrl-C should not take minutes on a laptop.
_STOP_GRACE_SECONDS = 30.0
_TERMINATE_SECONDS = 45.0  # torchrun's own 30 s after SIGTERM, and a margin

Say = Callable[[str], None]


@dataclass
class Service:
    """One of our own processes: started again when it ends by itself."""

    name: str
    module: str
    env: dict[str, str]
    log: Path
    stop_seconds: float
    is_ready: Callable[[], bool]
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    pause: float = _FIRST_PAUSE
    start_at: float | None = None  # when to start it again; None while it runs

    def start(self) -> None:
        """Start the process; it dies with us."""
        command = [sys.executable, "-m", self.module]
        self.process = start_process(command, log=self.log, env=self.env, cwd=_project_dir())
        self.started_at = time.monotonic()
        self.start_at = None

    def stop(self) -> None:
        """Stop the process in good order, with everything below it."""
        if self.process is not None:
            stop_process(self.process, grace_seconds=self.stop_seconds)

    def look_after(self, say: Say) -> None:
        """Report an end, and start again after a pause that grows with each early one."""
        if self.process is None or (self.start_at is None and self.process.poll() is None):
            return
        now = time.monotonic()
        if self.start_at is None:
            lived = now - self.started_at
            self.pause = _FIRST_PAUSE if lived > _HEALTHY_SECONDS else self.pause * 2
            self.pause = min(self.pause, _LONGEST_PAUSE)
            self.start_at = now + self.pause
            say(
                f"{self.name} ended with code {self.process.returncode}; it starts again in "
                f"{self.pause:.0f} s. Its last words ({self.log}):\n{log_tail(self.log)}"
            )
        elif now >= self.start_at:
            self.start()
            say(f"{self.name} runs again (pid {self.process.pid})")


@dataclass
class Platform:
    """A running platform; `stop` ends every process in order, the last started first."""

    url: str
    data_dir: Path
    pids: dict[str, int]
    services: list[Service]
    servers: dict[str, subprocess.Popen[bytes]]
    stops: ExitStack = field(repr=False)

    def look_after(self, say: Say) -> None:
        """Start services that have ended again; raises StartFailed when a server has died."""
        for name, process in self.servers.items():
            if process.poll() is not None:
                raise StartFailed(
                    f"{name} ended with code {process.returncode}, and nothing works without it:\n"
                    + log_tail(self.data_dir / "logs" / f"{name}.log")
                )
        for service in self.services:
            service.look_after(say)

    def stop(self) -> None:
        self.stops.close()

    def to_json(self) -> str:
        """Return what another program needs to find the platform."""
        found = {"url": self.url, "data_dir": str(self.data_dir), "pids": self.pids}
        return json.dumps(found | {"pid": os.getpid()})


def start_platform(data_dir: Path, *, port: int, models: list[Path], say: Say) -> Platform:
    """Start everything and wait until it answers; `port` 0 takes a free one.

    Raises StartFailed with a sentence for a person; nothing is left running then.
    """
    with ExitStack() as stops:
        data_dir = _usable_directory(data_dir)
        stops.enter_context(_locked(data_dir))
        roots = [_model_root(path) for path in models]
        port = _free_port(port)
        url = f"http://127.0.0.1:{port}"
        postgres = start_postgres(data_dir)
        stops.callback(postgres.stop)
        say(f"postgres   ready  pid {postgres.process.pid}")
        valkey = start_valkey(data_dir)
        stops.callback(valkey.stop)
        say(f"valkey     ready  pid {valkey.process.pid}")
        env = dict(os.environ)
        env.setdefault("STILLHOUSE_STOP_GRACE_SECONDS", str(_STOP_GRACE_SECONDS))
        env.update(
            PYTHONUNBUFFERED="1",
            STILLHOUSE_DATABASE_URL=postgres.url,
            STILLHOUSE_BROKER_URL=valkey.url,
            STILLHOUSE_DATA_DIR=str(data_dir),
            STILLHOUSE_HOST="127.0.0.1",
            STILLHOUSE_PORT=str(port),
            STILLHOUSE_MODEL_ROOTS=json.dumps([str(root) for root in roots]),
        )
        _migrate(env, data_dir / "logs" / "migrations.log")
        say("migrations done")
        services = _services(env, data_dir=data_dir, url=url)
        for service in services:
            service.start()
            stops.callback(service.stop)
        for service in services:
            _until_ready(service)
            assert service.process is not None
            say(f"{service.name:<10} ready  pid {service.process.pid}")
        started = {service.name: service.process for service in services}
        servers = {"postgres": postgres.process, "valkey": valkey.process}
        pids = {name: process.pid for name, process in (servers | started).items() if process}
        return Platform(
            url=url,
            data_dir=data_dir,
            pids=pids,
            services=services,
            servers=servers,
            stops=stops.pop_all(),
        )


def _services(env: dict[str, str], *, data_dir: Path, url: str) -> list[Service]:
    """Return workers first and the API last, so that it is the first to stop."""
    found = []
    grace = float(env["STILLHOUSE_STOP_GRACE_SECONDS"])
    for name in ("trainer", "distiller"):
        ready = data_dir / "run" / f"{name}.ready"
        ready.parent.mkdir(exist_ok=True)
        ready.unlink(missing_ok=True)
        found.append(
            Service(
                name=name,
                module=f"services.{name}.worker",
                env=env | {"STILLHOUSE_READY_FILE": str(ready)},
                log=data_dir / "logs" / f"{name}.log",
                stop_seconds=grace + _TERMINATE_SECONDS,
                is_ready=ready.exists,
            )
        )
    api = Service(
        name="api",
        module="services.api.main",
        env=env,
        log=data_dir / "logs" / "api.log",
        stop_seconds=_API_STOP_SECONDS,
        is_ready=lambda: _answers(f"{url}/readyz"),
    )
    return [*found, api]


def _usable_directory(data_dir: Path) -> Path:
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        (data_dir / "logs").mkdir(exist_ok=True)
        probe = data_dir / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StartFailed(
            f"The data directory {data_dir} cannot be written: {error.strerror}. "
            "Choose another with --data-dir."
        ) from error
    return data_dir.resolve()


def _locked(data_dir: Path) -> IO[str]:
    """Hold the data directory's lock; the kernel frees it when we die, however that happens."""
    file = (data_dir / "up.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise StartFailed(f"A platform already runs on {data_dir} ({holder}).") from error
    file.truncate(0)
    file.write(f"pid {os.getpid()}")
    file.flush()
    return file


def _model_root(path: Path) -> Path:
    if not path.is_dir():
        raise StartFailed(f"--models {path} is not a directory.")
    return path.resolve()


def _free_port(port: int) -> int:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise StartFailed(
                f"Port {port} cannot be used: {error.strerror}. Choose another with --port, "
                "or --port 0 for a free one."
            ) from error
        return int(probe.getsockname()[1])


def _migrate(env: dict[str, str], log: Path) -> None:
    command = [sys.executable, "-m", "services.shared.jobs.migrations"]
    migration = start_process(command, log=log, env=env, cwd=_project_dir())
    try:
        code = migration.wait(_START_SECONDS)
    finally:
        stop_process(migration, stop_signal=signal.SIGKILL, grace_seconds=5)
    if code != 0:
        raise StartFailed(f"The database could not be migrated ({log}):\n{log_tail(log)}")


def _until_ready(service: Service) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not service.is_ready():
        assert service.process is not None
        if service.process.poll() is not None or time.monotonic() > deadline:
            raise StartFailed(
                f"{service.name} did not start ({service.log}):\n{log_tail(service.log)}"
            )
        time.sleep(0.1)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _project_dir() -> Path:
    """Return the directory from which `services` imports, for a checkout that is not installed."""
    return Path(__file__).resolve().parents[2]
