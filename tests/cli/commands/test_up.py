"""`stillhouse up` as a process: output, restarts, shutdown."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from services.cli.embedded.servers import Server, StartFailed
from services.cli.embedded.supervisor import Backend, Service
from services.shared.launch.processes import is_alive

COMPONENTS = {"postgres", "valkey", "trainer", "distiller", "api"}


@dataclass
class Up:
    process: subprocess.Popen[str]
    ready: dict[str, Any]
    log: Path

    @property
    def url(self) -> str:
        return str(self.ready["url"])

    def processes(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


def _command(data_dir: Path, *options: str) -> list[str]:
    return [
        *(sys.executable, "-m", "services.cli.main", "up"),
        *("--data-dir", str(data_dir), *(options or ("--port", "0"))),
    ]


def _start(data_dir: Path, scratch: Path) -> Up:
    log = scratch / "up.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*_command(data_dir), "--json"],
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    line = process.stdout.readline()  # ends early, and empty, if it does not start
    assert line, log.read_text()
    return Up(process=process, ready=json.loads(line), log=log)


def _stop(up: Up, number: signal.Signals) -> None:
    up.process.send_signal(number)
    up.process.wait(90)
    assert up.process.stdout is not None
    up.process.stdout.close()


def _is_logged(up: Up, text: str) -> bool:
    return text in up.log.read_text()


def _until(condition: Callable[[], bool], *, seconds: float = 60) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _error_output(data_dir: Path, *options: str) -> str:
    """Return the standard error of `up`, which exits with code 1."""
    done = subprocess.run(
        _command(data_dir, *options), capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("up") / "data"


@pytest.fixture(scope="module")
def crashed(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A first platform, which stores a dataset and is then killed."""
    up = _start(data_dir, tmp_path_factory.mktemp("first"))
    rows = "".join(json.dumps({"text": f"text {n}", "mood": "ab"[n % 2]}) + "\n" for n in range(40))
    answer = httpx.post(
        f"{up.url}/datasets",
        data={"name": "kept", "heads": '[{"name": "mood"}]'},
        files={"file": ("kept.jsonl", rows)},
        timeout=60,
    )
    members = up.processes()
    _stop(up, signal.SIGKILL)
    gone = _until(lambda: not any(is_alive(member) for member in members), seconds=30)
    return {"answer": answer, "members": members, "gone": gone, "ready": up.ready}


@pytest.fixture(scope="module")
def up(
    crashed: dict[str, Any], data_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Up]:
    """A second platform, on the data directory of the one that was killed."""
    found = _start(data_dir, tmp_path_factory.mktemp("second"))
    yield found
    if found.process.poll() is None:
        _stop(found, signal.SIGTERM)


def test_every_component_runs_once_the_platform_is_ready(crashed: dict[str, Any]) -> None:
    assert set(crashed["ready"]["pids"]) == COMPONENTS
    assert set(crashed["ready"]["pids"].values()) <= {member.pid for member in crashed["members"]}


def test_no_process_survives_a_platform_that_is_killed(crashed: dict[str, Any]) -> None:
    assert len(crashed["members"]) > len(COMPONENTS)
    assert crashed["gone"], [member for member in crashed["members"] if is_alive(member)]


def test_a_second_platform_continues_with_the_data_of_the_first(
    crashed: dict[str, Any], up: Up
) -> None:
    stored = crashed["answer"]
    assert stored.status_code == 201, stored.text
    listed = httpx.get(f"{up.url}/datasets").json()["items"]
    assert [dataset["id"] for dataset in listed] == [stored.json()["id"]]


def test_the_output_has_a_line_per_component_and_the_url(up: Up) -> None:
    lines = up.log.read_text().splitlines()
    parts = {line.split()[0] for line in lines if "ready  pid" in line}
    assert parts == COMPONENTS
    assert f"Stillhouse is ready at {up.url}" in lines[-1]


def test_the_platform_listens_on_loopback_only(up: Up) -> None:
    listening = []
    for member in up.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # one that ended since it was listed
            listening += [
                connection.laddr.ip
                for connection in member.net_connections("inet")
                if connection.status == psutil.CONN_LISTEN
            ]
    assert listening == ["127.0.0.1"]


def test_other_users_cannot_read_the_data(up: Up, data_dir: Path) -> None:
    assert data_dir.stat().st_mode & 0o077 == 0


def test_a_data_directory_in_use_is_reported(up: Up, data_dir: Path) -> None:
    said = _error_output(data_dir)
    assert f"A platform is already running on {data_dir} (pid {up.process.pid})" in said


def test_a_worker_that_exits_is_reported_and_restarted(up: Up) -> None:
    os.kill(up.ready["pids"]["trainer"], signal.SIGKILL)
    assert _until(lambda: "trainer restarted" in up.log.read_text())
    assert "trainer exited with code -9" in up.log.read_text()


def test_postgres_and_valkey_are_restarted_with_their_data(up: Up) -> None:
    before = httpx.get(f"{up.url}/datasets").json()
    for name in ("postgres", "valkey"):
        os.kill(up.ready["pids"][name], signal.SIGKILL)
    for name in ("postgres", "valkey"):
        assert _until(partial(_is_logged, up, f"{name} restarted"))
    assert _until(lambda: httpx.get(f"{up.url}/readyz").status_code == 200)
    assert httpx.get(f"{up.url}/datasets").json() == before


def test_sigterm_shuts_down_gracefully_and_leaves_no_process(up: Up) -> None:
    members = up.processes()
    _stop(up, signal.SIGTERM)
    assert up.process.returncode == 0
    assert [member for member in members if is_alive(member)] == []
    assert "Stopped." in up.log.read_text()
    # A server that was shut down gracefully has removed its pid file.
    assert not (Path(up.ready["data_dir"]) / "postgres" / "postmaster.pid").exists()


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        said = _error_output(tmp_path / "data", "--port", str(port))
    assert f"Port {port} is not available" in said


@pytest.mark.parametrize("where", ["file", "file/below"])
def test_a_data_directory_that_cannot_be_created_is_reported(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert f"{tmp_path / where} is not writable" in _error_output(tmp_path / where)


def test_a_missing_models_directory_is_reported(tmp_path: Path) -> None:
    said = _error_output(tmp_path / "data", "--models", str(tmp_path / "nowhere"), "--port", "0")
    assert f"--models {tmp_path / 'nowhere'} is not a directory" in said


def test_a_backend_that_does_not_start_is_retried_and_its_error_reported(tmp_path: Path) -> None:
    def refuse() -> Server:
        raise StartFailed("PANIC: could not write")

    dead = subprocess.Popen(["false"])
    dead.wait()
    backend = Backend(
        name="postgres",
        log=tmp_path / "log",
        start_server=refuse,
        process=dead,
        started_at=time.monotonic(),
    )
    messages: list[str] = []
    backend.restart_if_exited(messages.append)
    backend.restart_at = 0.0
    backend.restart_if_exited(messages.append)
    assert "postgres exited with code 1" in messages[0]
    assert "PANIC: could not write" in messages[1]
    assert backend.backoff_seconds == 4


def test_the_back_off_doubles_while_a_service_keeps_exiting(tmp_path: Path) -> None:
    service = Service(
        name="api",
        module="no_such_module",
        env=dict(os.environ),
        log=tmp_path / "api.log",
        stop_seconds=1,
        is_ready=lambda: False,
    )
    messages: list[str] = []
    backoffs = []
    for _ in range(3):
        service.start()
        assert service.process is not None
        service.process.wait()
        service.restart_if_exited(messages.append)
        backoffs.append(service.backoff_seconds)
    assert backoffs == [2, 4, 8]
    assert "No module named no_such_module" in messages[-1]
