"""The file whose age tells a container's health check that the worker still sweeps."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.shared.jobs.errors import Unavailable
from services.shared.launch import worker


class _StopAfter(threading.Event):
    """An event that lets a number of sweeps pass without waiting for them."""

    def __init__(self, sweeps: int) -> None:
        super().__init__()
        self.sweeps = sweeps

    def wait(self, timeout: float | None = None) -> bool:
        self.sweeps -= 1
        return self.sweeps < 0


@pytest.fixture
def alive_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "alive"
    monkeypatch.setenv(worker.ALIVE_FILE, str(path))
    return path


def _sweep_once(monkeypatch: pytest.MonkeyPatch, sweep: Any) -> None:
    monkeypatch.setattr(worker, "sweep", sweep)
    store: Any = SimpleNamespace(settings=SimpleNamespace(sweep_seconds=15.0))
    app: Any = None
    worker._sweep_until(_StopAfter(1), app=app, store=store)


def test_a_sweep_that_succeeded_touches_the_file(
    alive_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sweep_once(monkeypatch, lambda *_: [])
    assert alive_file.exists()


def test_a_sweep_that_failed_leaves_the_file_alone(
    alive_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Unavailable("the database does not answer")

    _sweep_once(monkeypatch, fail)
    assert not alive_file.exists()


def test_without_a_name_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(worker.ALIVE_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    _sweep_once(monkeypatch, lambda *_: [])
    assert list(tmp_path.iterdir()) == []
