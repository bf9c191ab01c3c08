"""A platform as a user starts it: `stillhouse up` in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class RunningPlatform:
    """Where the platform of a test listens and keeps its data."""

    url: str
    data_dir: Path


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    """A platform on a free port; it stops, with everything it started, after the module."""
    data_dir = tmp_path_factory.mktemp("platform")
    ready = data_dir / "ready.json"
    command = [sys.executable, "-m", "services.cli.main", "up", "--port", "0"]
    command += ["--data-dir", str(data_dir / "data"), "--ready-file", str(ready)]
    log = data_dir / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 90
        while not ready.exists():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield RunningPlatform(json.loads(ready.read_text())["url"], data_dir / "data")
    finally:
        process.terminate()
        assert process.wait(120) == 0, log.read_text()
