"""Runs the whole platform as child processes: servers, migrations, API and one worker per queue."""

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

from services.cli.embedded.log_rotation import rotate
from services.cli.embedded.servers import StartFailed, log_tail, start_postgres, start_valkey
from services.cli.embedded.supervisor import Backend, Component, Notify, Service, project_dir
from services.shared.launch.processes import start_process, stop_process

_START_SECONDS = 120.0  # the API imports torch: 3 to 8 s, much longer from a cold or shared disk
_API_STOP_SECONDS = 15.0
# Ranks save a checkpoint before they exit; Ctrl-C should not take minutes on a laptop.
_STOP_GRACE_SECONDS = 30.0
_TERMINATE_SECONDS = 45.0  # torchrun's own 30 s after SIGTERM, and a margin


@dataclass
class Platform:
    """A running platform; `stop` ends its processes in reverse order of their start."""

    url: str
    data_dir: Path
    components: list[Component]
    exit_stack: ExitStack = field(repr=False)

    @property
    def pids(self) -> dict[str, int]:
        """The current process ids by component; a restart changes them."""
        return {each.name: each.process.pid for each in self.components if each.process}

    def restart_exited(self, notify: Notify) -> bool:
        """Restart components that have exited, keep logs bounded; return whether a process id has changed."""
        before = self.pids
        for component in self.components:
            component.restart_if_exited(notify)
            rotate(component.log)
        return self.pids != before

    def stop(self) -> None:
        self.exit_stack.close()

    def to_json(self) -> str:
        """Return the URL, data directory and process ids, for other programs."""
        document = {"url": self.url, "data_dir": str(self.data_dir), "pids": self.pids}
        return json.dumps(document | {"pid": os.getpid()})


def start_platform(data_dir: Path, *, port: int, models: list[Path], notify: Notify) -> Platform:
    """Start every component and wait until it is ready; `port` 0 selects a free one.

    Raises StartFailed with a message for the user, and leaves nothing running then.
    """
    with ExitStack() as exit_stack:
        data_dir = _prepare_data_dir(data_dir)
        exit_stack.enter_context(lock_data_dir(data_dir))
        roots = [_model_root(path) for path in models]
        port = _free_port(port)
        url = f"http://127.0.0.1:{port}"
        postgres, valkey = _backends(data_dir)
        for backend in (postgres, valkey):
            backend.start()
            exit_stack.callback(backend.stop)
            assert backend.process is not None
            notify(f"{backend.name:<10} ready  pid {backend.process.pid}")
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
        migrate(env, data_dir / "logs" / "migrations.log")
        notify("migrations done")
        services = _services(env, data_dir=data_dir, url=url)
        for service in services:
            service.start()
            exit_stack.callback(service.stop)
        for service in services:
            _wait_until_ready(service)
            assert service.process is not None
            notify(f"{service.name:<10} ready  pid {service.process.pid}")
        components = [postgres, valkey, *services]
        return Platform(
            url=url, data_dir=data_dir, components=components, exit_stack=exit_stack.pop_all()
        )


def _backends(data_dir: Path) -> tuple[Backend, Backend]:
    logs = data_dir / "logs"
    postgres = Backend(
        name="postgres", log=logs / "postgres.log", start_server=lambda: start_postgres(data_dir)
    )
    valkey = Backend(
        name="valkey", log=logs / "valkey.log", start_server=lambda: start_valkey(data_dir)
    )
    return postgres, valkey


def _services(env: dict[str, str], *, data_dir: Path, url: str) -> list[Service]:
    """Return the workers, then the API, so that the API is stopped first."""
    services = []
    grace = float(env["STILLHOUSE_STOP_GRACE_SECONDS"])
    for name in ("trainer", "distiller"):
        ready = data_dir / "run" / f"{name}.ready"
        ready.parent.mkdir(exist_ok=True)
        ready.unlink(missing_ok=True)
        services.append(
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
        is_ready=lambda: _is_healthy(f"{url}/readyz"),
    )
    return [*services, api]


def _prepare_data_dir(data_dir: Path) -> Path:
    try:
        if not data_dir.exists():
            # It holds texts, models and the database's socket: nothing for other users of the machine.
            data_dir.mkdir(parents=True, mode=0o700)
        (data_dir / "logs").mkdir(exist_ok=True)
        probe = data_dir / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StartFailed(
            f"The data directory {data_dir} is not writable: {error.strerror}. "
            "Choose another with --data-dir."
        ) from error
    return data_dir.resolve()


def lock_data_dir(data_dir: Path) -> IO[str]:
    """Lock the data directory; the kernel releases the lock when this process ends in any way.

    Raises StartFailed where another process holds it.
    """
    file = (data_dir / "up.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise StartFailed(f"A platform is already running on {data_dir} ({holder}).") from error
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
                f"Port {port} is not available: {error.strerror}. Choose another with --port, "
                "or --port 0 for a free one."
            ) from error
        return int(probe.getsockname()[1])


def migrate(env: dict[str, str], log: Path) -> None:
    """Migrate the database of an environment. Raises StartFailed."""
    command = [sys.executable, "-m", "services.shared.jobs.db.migrations"]
    migration = start_process(command, log=log, env=env, cwd=project_dir())
    try:
        code = migration.wait(_START_SECONDS)
    finally:
        stop_process(migration, stop_signal=signal.SIGKILL, grace_seconds=5)
    if code != 0:
        raise StartFailed(f"Migrating the database failed ({log}):\n{log_tail(log)}")


def _wait_until_ready(service: Service) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while not service.is_ready():
        assert service.process is not None
        if service.process.poll() is not None or time.monotonic() > deadline:
            raise StartFailed(
                f"{service.name} did not start ({service.log}):\n{log_tail(service.log)}"
            )
        time.sleep(0.1)


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
