"""What a worker does around its sweeps: touch the health file, leave leases alone after an outage."""

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


def _sweep(monkeypatch: pytest.MonkeyPatch, sweep: Any, *, sweeps: int = 1) -> None:
    monkeypatch.setattr(worker, "sweep", sweep)
    monkeypatch.setattr(worker, "Upkeep", lambda store: SimpleNamespace(run=lambda: None))
    settings = SimpleNamespace(sweep_seconds=15.0, tidy_seconds=600.0, lease_seconds=60.0)
    store: Any = SimpleNamespace(settings=settings)
    app: Any = None
    worker.sweep_periodically(_StopAfter(sweeps), app=app, store=store)


def test_a_sweep_that_succeeded_touches_the_file(
    alive_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _sweep(monkeypatch, lambda *_, **__: [])
    assert alive_file.exists()


def test_a_sweep_that_failed_leaves_the_file_alone(
    alive_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise Unavailable("the database does not answer")

    _sweep(monkeypatch, fail)
    assert not alive_file.exists()


def test_without_a_name_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(worker.ALIVE_FILE, raising=False)
    monkeypatch.chdir(tmp_path)
    _sweep(monkeypatch, lambda *_, **__: [])
    assert list(tmp_path.iterdir()) == []


def test_after_the_machine_slept_leases_get_the_time_of_a_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The wall clock jumps by 70 s between two sweeps; the monotonic clock does not count the sleep."""
    wall, awake = [5000.0], [1000.0]
    calls: list[tuple[float, bool]] = []
    monkeypatch.setattr("services.shared.launch.worker.time.time", lambda: wall[0])
    monkeypatch.setattr("services.shared.launch.worker.time.monotonic", lambda: awake[0])

    def sweep(*_: object, ends_lost: bool) -> None:
        calls.append((awake[0], ends_lost))
        awake[0] += 15
        wall[0] += 85 if len(calls) == 2 else 15

    _sweep(monkeypatch, sweep, sweeps=9)
    spared = [at for at, ends_lost in calls if not ends_lost]
    assert spared == [1030.0, 1045.0, 1060.0, 1075.0, 1090.0]  # 15 s and a lease of 60 s


def test_after_an_outage_leases_get_the_time_of_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [1000.0], []
    monkeypatch.setattr("services.shared.launch.worker.time.monotonic", lambda: clock[0])

    def sweep(*_: object, ends_lost: bool) -> None:
        calls.append((clock[0], ends_lost))
        clock[0] += 15.0
        if len(calls) in (2, 3):
            raise Unavailable("the database does not answer")

    _sweep(monkeypatch, sweep, sweeps=9)
    spared = [at for at, ends_lost in calls if not ends_lost]
    # The second outage ends at 1045; 15 s to the next sweep and 60 s of a lease.
    assert (min(spared), max(spared)) == (1030.0, 1105.0)
    assert calls[-1][1]
