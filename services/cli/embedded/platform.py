"""The whole platform as child processes of one: servers, migrations, API, a worker for each queue."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from services.cli.embedded.servers import StartFailed, log_tail, start_postgres, start_valkey
from services.cli.embedded.supervisor import Backend, Part, Say, Service, project_dir
from services.shared.launch.processes import start_process, stop_process

_START_SECONDS = 120.0  # the API loads torch: 3 to 8 s, much longer from a cold or shared disk
_API_STOP_SECONDS = 15.0
# Ranks save before they leave; Ctrl-C should not take minutes on a laptop.
_STOP_GRACE_SECONDS = 30.0
_TERMINATE_SECONDS = 45.0  # torchrun's own 30 s after SIGTERM, and a margin


@dataclass
class Platform:
    """A running platform; `stop` ends every process in order, the last started first."""

    url: str
    data_dir: Path
    parts: list[Part]
    stops: ExitStack = field(repr=False)

    @property
    def pids(self) -> dict[str, int]:
        """The parts' process ids now; a part that was started again has a new one."""
        return {part.name: part.process.pid for part in self.parts if part.process}

    def look_after(self, say: Say) -> bool:
        """Start parts that have ended again; return whether one runs under a new pid."""
        before = self.pids
        for part in self.parts:
            part.look_after(say)
        return self.pids != before

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
        postgres, valkey = _backends(data_dir)
        for backend in (postgres, valkey):
            backend.start()
            stops.callback(backend.stop)
            assert backend.process is not None
            say(f"{backend.name:<10} ready  pid {backend.process.pid}")
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
        parts = [postgres, valkey, *services]
        return Platform(url=url, data_dir=data_dir, parts=parts, stops=stops.pop_all())


def _backends(data_dir: Path) -> tuple[Backend, Backend]:
    logs = data_dir / "logs"
    postgres = Backend(
        name="postgres", log=logs / "postgres.log", open=lambda: start_postgres(data_dir)
    )
    valkey = Backend(name="valkey", log=logs / "valkey.log", open=lambda: start_valkey(data_dir))
    return postgres, valkey


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
    command = [sys.executable, "-m", "services.shared.jobs.db.migrations"]
    migration = start_process(command, log=log, env=env, cwd=project_dir())
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
