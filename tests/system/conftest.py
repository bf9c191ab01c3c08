"""A platform started as a user would: `stillhouse up` in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    with running_platform(tmp_path_factory.mktemp("platform")) as started:
        yield started


@contextmanager
def running_platform(data_dir: Path, *, models: Path | None = None) -> Iterator[RunningPlatform]:
    """Start a platform whose jobs may refer to the directories below `models`; stop it afterwards."""
    ready = data_dir / "ready.json"
    command = [sys.executable, "-m", "services.cli.main", "up", "--port", "0"]
    command += ["--data-dir", str(data_dir / "data"), "--ready-file", str(ready)]
    command += [] if models is None else ["--models", str(models)]
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
