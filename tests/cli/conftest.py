"""A real API and database without workers, so that queued jobs stay queued."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
import pytest

from services.cli.embedded.servers import Server


@pytest.fixture(scope="module")
def api_url(
    migrated: Server, valkey: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The URL of an API that serves this module alone."""
    admin = migrated.url.replace("+psycopg", "").replace("/stillhouse?", "/postgres?")
    name = f"cli_{os.getpid()}_{time.monotonic_ns()}"
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name} TEMPLATE stillhouse STRATEGY file_copy")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    scratch = tmp_path_factory.mktemp("api")
    env = dict(os.environ) | {
        "STILLHOUSE_DATABASE_URL": migrated.url.replace("/stillhouse?", f"/{name}?"),
        "STILLHOUSE_BROKER_URL": valkey.url,
        "STILLHOUSE_DATA_DIR": str(scratch / "data"),
        "STILLHOUSE_PORT": str(port),
    }
    log = scratch / "api.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.api.main"],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    _wait_for(url, process, log)
    yield url
    process.terminate()
    process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 120
    while True:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        try:
            if httpx.get(f"{url}/readyz").is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
