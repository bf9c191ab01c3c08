"""A platform started as a user would: `stillhouse up` in its own process."""

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
    """The URL and the data directory of a platform."""

    url: str
    data_dir: Path


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    """A platform on a free port, stopped with all of its processes after the module."""
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
