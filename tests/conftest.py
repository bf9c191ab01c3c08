"""Real servers for the whole session: one Postgres, one Valkey, a migrated database for each test."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis
from hypothesis import settings

from services.cli.embedded.servers import Server, start_postgres, start_valkey
from services.shared.jobs.db.migrations.upgrade import migrate

_TEMPLATE = "stillhouse"  # the database that start_postgres makes, migrated once a session
_numbers = itertools.count(1)


# Random examples find faults at the desk; what lands must not depend on luck.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of tests marked `anyio`."""
    return "asyncio"


@pytest.fixture(scope="session")
def servers_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of this session's servers."""
    return tmp_path_factory.mktemp("servers")


@pytest.fixture(scope="session")
def postgres(servers_dir: Path) -> Iterator[Server]:
    """A Postgres 18 whose database `stillhouse` is empty; `.url` names that database."""
    server = start_postgres(servers_dir, durable=False)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def migrated(postgres: Server) -> Server:
    """The same Postgres after all migrations of `stillhouse`, the template of every test's database."""
    migrate(postgres.url)
    return postgres


@pytest.fixture
def database_url(migrated: Server) -> Iterator[str]:
    """A freshly migrated database of this test's own, as an SQLAlchemy URL."""
    name = f"test_{next(_numbers)}"
    admin = migrated.url.replace("+psycopg", "").replace("/stillhouse?", "/postgres?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE {_TEMPLATE} STRATEGY file_copy")
    yield migrated.url.replace("/stillhouse?", f"/{name}?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(scope="session")
def valkey(servers_dir: Path) -> Iterator[Server]:
    """A Valkey for the whole session; `.url` is what Celery takes."""
    server = start_valkey(servers_dir, durable=False)
    yield server
    server.stop()


@pytest.fixture
def broker_url(valkey: Server) -> str:
    """The broker's URL, emptied for this test."""
    socket = valkey.url.removeprefix("redis+socket://")
    with redis.Redis(unix_socket_path=socket) as client:
        client.flushall()
    return valkey.url


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """A data directory of this test's own (STILLHOUSE_DATA_DIR)."""
    path = tmp_path / "data"
    path.mkdir()
    return path


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """A memory cgroup (v1) below our own, limited to 96 MiB."""
    path = make_cgroup()
    if path is None:
        pytest.skip("no memory cgroup (version 1) can be made here")
    (path / "memory.limit_in_bytes").write_text(str(96 << 20))
    yield path
    remove_cgroup(path)


def make_cgroup() -> Path | None:
    """Make a memory cgroup (v1) below our own, or return None where that cannot be done."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if "memory" not in controllers.split(","):
            continue
        path = Path("/sys/fs/cgroup/memory") / own.lstrip("/") / f"stillhouse_test_{os.getpid()}"
        try:
            path.mkdir()
            (path / "memory.limit_in_bytes").write_text("-1")  # none yet; may it be written?
        except OSError:
            remove_cgroup(path)
            return None
        return path
    return None


def remove_cgroup(path: Path) -> None:
    """Remove a cgroup once the kernel has let the last of its processes go."""
    deadline = time.monotonic() + 10
    while path.exists() and time.monotonic() < deadline:
        try:
            path.rmdir()
        except OSError:
            continue


@pytest.fixture(scope="session")
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone; a process has one, whichever room's tests ask first."""
    # Imported here: most tests need no torch, and it takes seconds.
    import torch.distributed as dist

    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests have measured (`record_property`), from whichever process they ran in."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            terminalreporter.write_line(f"{name}: {value}")
