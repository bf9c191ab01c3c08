"""What is attacked: a real API with Postgres and Valkey on loopback, and keys of several scopes and projects."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.fuzz.api_alone import ApiAlone, api_alone
from tests.fuzz.small_model import SMALL_MODEL

_SCOPES = {
    "submitter": ("first", ["submit"]),
    "other": ("second", ["submit"]),
    "third": ("second", ["submit"]),
    "classifier": ("first", ["predict"]),
}
ROWS = b"".join(
    b'{"text": "text %d", "tone": "%s"}\n' % (n, (b"bad", b"good")[n % 2]) for n in range(60)
)


@dataclass
class Target:
    """A running API, a client for each of its keys, and what several attacks need."""

    api: ApiAlone
    keys: dict[str, str]
    _ids: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.api.settings.port

    def client(self, name: str) -> httpx.Client:
        """Return a client with the key of that name."""
        headers = {"Authorization": f"Bearer {self.keys[name]}"}
        return httpx.Client(base_url=self.api.url, headers=headers, timeout=90)

    def dataset(self) -> str:
        """Return the id of a dataset of the project `first`."""
        if "dataset" not in self._ids:
            self._ids["dataset"] = _created(upload(self, "submitter"))
        return self._ids["dataset"]

    def spec(self, **fields: Any) -> dict[str, Any]:
        """Return the spec of a teacher job that fits."""
        teacher = {"kind": "teacher", "dataset_id": self.dataset(), "model": SMALL_MODEL}
        return {**teacher, **fields}

    def job(self) -> str:
        """Return the id of a queued job of the project `first`."""
        if "job" not in self._ids:
            with self.client("submitter") as client:
                self._ids["job"] = _created(client.post("/jobs", json=self.spec()))
        return self._ids["job"]

    def rss(self) -> int:
        """Return the resident memory of the API process in bytes."""
        return int(psutil.Process(self.api.pid).memory_info().rss)

    @contextmanager
    def latency(self) -> Iterator[list[float]]:
        """Measure how long `/livez` takes during the block; the list has the seconds of each request."""
        seconds: list[float] = []
        done = threading.Event()

        def measure() -> None:
            while not done.is_set():
                started = time.perf_counter()
                httpx.get(f"{self.api.url}/livez", timeout=90)
                seconds.append(time.perf_counter() - started)
                done.wait(0.05)

        thread = threading.Thread(target=measure)
        thread.start()
        try:
            yield seconds
        finally:
            done.set()
            thread.join()

    def head(self, name: str, method: bytes, path: bytes, *headers: bytes) -> bytes:
        """Return the bytes of a request's header, with the key of that name."""
        lines = [b"%s %s HTTP/1.1" % (method, path), b"Host: 127.0.0.1", *headers]
        lines.append(b"Authorization: Bearer " + self.keys[name].encode())
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def connect(self) -> socket.socket:
        """Return a raw connection to the API."""
        return socket.create_connection(self.address, timeout=30)


def _created(response: httpx.Response) -> str:
    assert response.is_success, response.text
    return str(response.json()["id"])


@contextmanager
def target(directory: Path) -> Iterator[Target]:
    """Run what is attacked, with all of its data below `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    keys = {name: secrets.token_hex(32) for name in _SCOPES}
    entries = {
        name: {
            "sha256": hashlib.sha256(keys[name].encode()).hexdigest(),
            "project": project,
            "scopes": scopes,
        }
        for name, (project, scopes) in _SCOPES.items()
    }
    file = directory / "scoped_keys.json"
    file.write_text(json.dumps(entries))
    settings = {"api_keys_file": str(file), "header_seconds": "3", "body_grace_seconds": "3"}
    with api_alone(directory / "platform", **settings) as api:
        yield Target(api, keys)


def upload(
    attacked: Target,
    name: str,
    *,
    content: bytes = ROWS,
    file: str = "rows.jsonl",
    heads: str = '[{"name": "tone"}]',
) -> httpx.Response:
    """Upload a dataset with the key of that name."""
    with attacked.client(name) as client:
        return client.post("/datasets", files={"file": (file, content)}, data={"heads": heads})
