"""Starts Postgres, Valkey and the API without workers: jobs are stored but never run."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from services.api.settings import ApiSettings
from services.cli.embedded.servers import log_tail, start_postgres, start_valkey
from services.shared.jobs.db.migrations.upgrade import migrate

ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 180.0


@dataclass(frozen=True)
class ApiAlone:
    """A running API with real servers, and its only key."""

    url: str
    key: str
    settings: ApiSettings
    pid: int
    log: Path

    def client(self) -> httpx.Client:
        """Return a client that sends the key."""
        headers = {"Authorization": f"Bearer {self.key}"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)


@contextmanager
def api_alone(directory: Path, **settings: str) -> Iterator[ApiAlone]:
    """Run the API on a free port with all its data below `directory`; `settings` become STILLHOUSE_*.

    Raises RuntimeError with the tail of its log if it does not start.
    """
    directory.mkdir(parents=True)
    key = secrets.token_hex(32)
    keys_file = directory / "keys.json"
    entry = {"sha256": hashlib.sha256(key.encode()).hexdigest(), "scopes": ["admin"]}
    keys_file.write_text(json.dumps({"all": entry}))
    postgres = start_postgres(directory, durable=False)
    try:
        migrate(postgres.url)
        valkey = start_valkey(directory, durable=False)
        try:
            port = _free_port()
            environment = {
                "database_url": postgres.url,
                "broker_url": valkey.url,
                "data_dir": str(directory / "data"),
                "api_keys_file": str(keys_file),
                "port": str(port),
                **settings,
            }
            log = directory / "logs" / "api.log"
            with log.open("wb") as output, _started(environment, output) as process:
                url = f"http://127.0.0.1:{port}"
                _until_ready(url, process, log)
                yield ApiAlone(url, key, _as_read(environment), process.pid, log)
        finally:
            valkey.stop()
    finally:
        postgres.stop()


@contextmanager
def _started(settings: dict[str, str], output: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("STILLHOUSE_")}
    own = {f"STILLHOUSE_{name.upper()}": value for name, value in settings.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "services.api.main"],
        env=inherited | own,
        cwd=ROOT,
        stdout=output,
        stderr=output,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/readyz", timeout=10).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError(f"The API did not start ({log}):\n{log_tail(log)}")


def _as_read(environment: dict[str, str]) -> ApiSettings:
    """Return the settings as the API reads them from its environment: structured ones are JSON."""
    values = {
        name: json.loads(value) if value.startswith(("{", "[")) else value
        for name, value in environment.items()
    }
    return ApiSettings.model_validate(values)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
