"""One long-lived platform for fault injection: the components and supervision of `stillhouse up`.

Differences from `stillhouse up`, all of them set here: a killed component is restarted after a second
(not after a back-off that grows to 30 s), workers reach Postgres through a proxy, leases last 8 s, and a
second trainer competes for messages.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import psutil
from celery import Celery
from sqlalchemy import text

from services.cli.embedded.platform import Platform, start_platform
from services.cli.embedded.supervisor import Backend, Component, Service
from services.shared.jobs.db.connection import transaction
from services.shared.jobs.db.store import Store, open_store
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.queue import make_celery
from services.shared.jobs.settings import JobSettings
from services.shared.launch.processes import RUN_MARK, is_alive
from tests.faults.proxy import PostgresProxy
from tests.faults.waiting import wait_until

T = TypeVar("T")

LEASE_SECONDS = 8.0
SETTINGS = {
    "STILLHOUSE_LEASE_SECONDS": str(LEASE_SECONDS),
    "STILLHOUSE_HEARTBEAT_SECONDS": "0.5",
    "STILLHOUSE_SWEEP_SECONDS": "1",
    "STILLHOUSE_TIDY_SECONDS": "5",
    "OMP_NUM_THREADS": "1",
}
VOLUME_SIZE = "768m"  # of the file system with runs and models
WORKERS = ("trainer", "trainer2", "distiller")


@dataclass
class RankProcess:
    """A process with the environment variable that marks a run."""

    process: psutil.Process
    job_id: str
    attempt: int
    is_torchrun: bool


@dataclass
class PlatformHarness:
    """The platform, and connections to its database and broker that no fault affects."""

    root: Path
    has_second_trainer: bool = True  # and a proxy between the workers and the database
    log: list[str] = field(default_factory=list)

    def start(self) -> None:
        """Start everything; returns when the workers take messages through the proxy."""
        self._environment = {name: os.environ.get(name) for name in SETTINGS}
        os.environ.update(SETTINGS)
        self.root.mkdir(parents=True, exist_ok=True)
        self._ready, self._stopping = threading.Event(), threading.Event()
        self._failure = ""
        # Components end with the thread that started them, so this thread outlives them.
        self._thread = threading.Thread(target=self._supervise, daemon=True)
        self._thread.start()
        self._ready.wait(300)
        assert self._ready.is_set(), self._failure
        assert not self._failure, self._failure

    def stop(self) -> None:
        """Stop every component and wait for it."""
        self._stopping.set()
        self._thread.join(240)
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if hasattr(self, "proxy"):
            self.proxy.close()
        if hasattr(self, "store"):
            self.store.engine.dispose()

    def notify(self, line: str) -> None:
        """Log a message of the supervision with its time."""
        stamped = f"{time.strftime('%H:%M:%S')} {line}"
        self.log.append(stamped)
        with (self.root / "supervision.log").open("a") as file:
            file.write(stamped + "\n")

    def component(self, name: str) -> Component:
        return next(each for each in self.platform.components if each.name == name)

    def signal_component(self, name: str, number: signal.Signals = signal.SIGKILL) -> int | None:
        """Signal a running component; return its pid, or None where it is down already."""
        component = self.component(name)
        if component.process is None or not component.is_running:
            return None
        os.kill(component.process.pid, number)
        return component.process.pid

    def is_up(self, name: str) -> bool:
        component = self.component(name)
        if not component.is_running:
            return False
        return not isinstance(component, Service) or component.is_ready()

    def wait_until_up(self, *, seconds: float = 120) -> bool:
        """Wait until every component runs and the API is ready."""
        return wait_until(
            lambda: all(map(self.is_up, self.platform.pids)), seconds=seconds, pause=0.2
        )

    def rank_processes(self) -> list[RankProcess]:
        """Return the living processes of all runs of this platform, by their environment."""
        prefix = f"{RUN_MARK}={self.settings.runs_dir}/".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
                mark = next((value for value in variables if value.startswith(prefix)), None)
                if mark is None:
                    continue
                job_id, number = mark.removeprefix(prefix).decode().split("/")
                process = psutil.Process(int(entry.name))
                if not is_alive(process):
                    continue
                words = process.cmdline()
            except (OSError, psutil.Error):
                continue
            is_torchrun = "torch.distributed.run" in words
            found.append(RankProcess(process, job_id, int(number), is_torchrun))
        return found

    def execute(self, statement: str, **values: object) -> list[tuple[object, ...]]:
        """Run one SQL statement on a connection of the harness, waiting for Postgres if necessary."""

        def once() -> list[tuple[object, ...]]:
            with transaction(self.store.engine) as session:
                result = session.execute(text(statement), values)
                return [tuple(row) for row in result] if result.returns_rows else []  # type: ignore[attr-defined]

        return self.retry_while_unavailable(once)

    def retry_while_unavailable(self, query: Callable[[], T], *, seconds: float = 90) -> T:
        """Return the result of a query, repeated while the database is unavailable."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                return query()
            except Unavailable:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)

    def _supervise(self) -> None:
        platform: Platform | None = None
        try:
            platform = start_platform(self.root / "data", port=0, models=[], notify=self.notify)
            self._configure(platform)
            self._ready.set()
            while not self._stopping.wait(0.1):
                platform.restart_exited(self.notify)
        except Exception:  # noqa: BLE001  (the thread's boundary: `start` and the campaign report it)
            self._failure = traceback.format_exc()
            self.notify(self._failure)
            self._ready.set()
        finally:
            if platform is not None:
                platform.stop()

    def _add_trainer(self, platform: Platform) -> None:
        trainer = next(each for each in platform.components if each.name == "trainer")
        assert isinstance(trainer, Service)
        ready = platform.data_dir / "run" / "trainer2.ready"
        second = Service(
            name="trainer2",
            module=trainer.module,
            env=trainer.env | {"STILLHOUSE_READY_FILE": str(ready)},
            log=platform.data_dir / "logs" / "trainer2.log",
            stop_seconds=trainer.stop_seconds,
            is_ready=ready.exists,
        )
        platform.exit_stack.callback(second.stop)
        platform.components.append(second)

    def _configure(self, platform: Platform) -> None:
        """Connect the workers through the proxy, add a trainer and shorten the back-off."""
        self.platform, self.url = platform, platform.url
        postgres, valkey = platform.components[:2]
        assert isinstance(postgres, Backend)
        assert isinstance(valkey, Backend)
        database_url = postgres.url
        sockets = Path(database_url.split("host=", 1)[1])
        self.proxy = PostgresProxy(sockets / ".s.PGSQL.5432")
        if self.has_second_trainer:
            self._add_trainer(platform)
        proxied_url = f"postgresql+psycopg://postgres@127.0.0.1:{self.proxy.port}/stillhouse"
        for component in platform.components:
            component.backoff_seconds, component.max_backoff_seconds = 0.5, 1.0
            if not self.has_second_trainer or component.name not in WORKERS:
                continue
            assert isinstance(component, Service)
            component.stop()
            component.env["STILLHOUSE_DATABASE_URL"] = proxied_url
            Path(component.env["STILLHOUSE_READY_FILE"]).unlink(missing_ok=True)
            component.start()
        self.settings = JobSettings(
            database_url=database_url,
            broker_url=valkey.url,
            data_dir=platform.data_dir,
            lease_seconds=LEASE_SECONDS,
        )
        self.store: Store = open_store(self.settings)
        self.celery: Celery = make_celery(self.settings)
        assert self.wait_until_up()


def mount_volume(data_dir: Path) -> Path | None:
    """Put runs and models on a small tmpfs of their own; None where mounting is not allowed."""
    volume = data_dir / "volume"
    volume.mkdir(parents=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={VOLUME_SIZE},mode=755", "tmpfs", str(volume)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(f"No full disk in this campaign: {done.stderr.strip()}", flush=True)
        volume.rmdir()
        return None
    for name in ("runs", "models"):
        (volume / name).mkdir()
        (data_dir / name).symlink_to(volume / name)
    return volume
