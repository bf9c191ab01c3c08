"""Closed-loop HTTP clients, and the CPU time of the server that they load."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path

import psutil

START_SECONDS = 300


@dataclass(frozen=True)
class Load:
    """The cost of one burst of requests."""

    requests: int
    errors: int
    seconds: float
    cpu_seconds: float
    p50_seconds: float
    p99_seconds: float

    def as_dict(self) -> dict[str, float]:
        """Return the figures that are reported."""
        return {
            "requests_per_second": self.requests / self.seconds,
            "cpu_seconds_per_request": self.cpu_seconds / self.requests,
            "p50_ms": 1000 * self.p50_seconds,
            "p99_ms": 1000 * self.p99_seconds,
            "errors": self.errors,
        }


@contextmanager
def serving(command: Sequence[str], *, port: int, env: dict[str, str], log: Path) -> Iterator[int]:
    """Run a server until it answers a first prediction, then yield its process id."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            _wait(port, process, log)
            yield process.pid
        finally:
            alive = process.poll() is None
            tree = psutil.Process(process.pid).children(recursive=True) if alive else []
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
            for child in tree:
                if child.is_running():
                    child.kill()


def send(port: int, pid: int, texts: Sequence[str], *, clients: int, field: str = "inputs") -> Load:
    """Send each text once, `clients` at a time, over connections that stay open."""
    latencies: list[float] = []
    errors: list[int] = []
    remaining = iter(list(texts))
    lock = threading.Lock()

    def client() -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=600)
        while True:
            with lock:
                text = next(remaining, None)
            if text is None:
                return
            started = time.perf_counter()
            status = _post(connection, {field: text})
            latencies.append(time.perf_counter() - started)
            if status != 200:
                errors.append(status)

    before, started = cpu_seconds(pid), time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        for future in [pool.submit(client) for _ in range(clients)]:
            future.result()
    seconds, after = time.perf_counter() - started, cpu_seconds(pid)
    latencies.sort()
    return Load(
        requests=len(texts),
        errors=len(errors),
        seconds=seconds,
        cpu_seconds=after - before,
        p50_seconds=latencies[len(latencies) // 2],
        p99_seconds=latencies[min(len(latencies) - 1, int(0.99 * len(latencies)))],
    )


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its descendants."""
    parent = psutil.Process(pid)
    times = [each.cpu_times() for each in (parent, *parent.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def free_port() -> int:
    """Return a port that is not in use now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _post(connection: HTTPConnection, body: dict[str, str]) -> int:
    connection.request("POST", "/predict", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status


def _wait(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            status = _post(HTTPConnection("127.0.0.1", port, timeout=120), {"inputs": "hello"})
            if status == 200:
                return
            if 400 <= status < 500:
                break  # it is running and will never accept this
        except OSError:
            pass
        time.sleep(0.25)
    raise RuntimeError(f"the server did not start: {log}\n{log.read_text()[-2000:]}")
