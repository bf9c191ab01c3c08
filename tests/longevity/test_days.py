"""Nine days of a small platform: rows and files stay bounded (the whole month: `make month`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from services.cli.embedded.servers import Server
from services.shared.jobs.db.migrations.upgrade import migrate
from services.shared.jobs.db.store import open_store
from services.shared.jobs.settings import JobSettings
from tests.longevity.clock import DatabaseClock
from tests.longevity.growth import faults_of
from tests.longevity.platform_days import RETENTION, DayCounts, Measurement, PlatformDays


@pytest.fixture
def days_url(postgres: Server) -> Iterator[str]:
    """A database of its own, whose clock is moved."""
    admin = postgres.url.replace("+psycopg", "").replace("/stillhouse?", "/postgres?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE DATABASE days TEMPLATE template0")
    url = postgres.url.replace("/stillhouse?", "/days?")
    migrate(url)
    yield url
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("DROP DATABASE days WITH (FORCE)")


@pytest.fixture
def student(tmp_path: Path) -> Path:
    """A directory in the place of an artifact: nothing loads it."""
    path = tmp_path / "student"
    path.mkdir()
    head = '{"name": "h", "type": "single_label", "labels": ["a", "b"]}'
    (path / "heads.json").write_text(f'{{"heads": [{head}]}}')
    (path / "manifest.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"x" * 50_000)
    return path


def test_rows_and_files_reach_a_steady_state(days_url: str, data_dir: Path, student: Path) -> None:
    settings = JobSettings.model_validate(
        {
            "database_url": days_url,
            "broker_url": "redis://nowhere",
            "data_dir": data_dir,
            "retention": RETENTION,
            "delete_grace_days": 1,
        }
    )
    clock = DatabaseClock(days_url)
    store = open_store(settings)
    platform = PlatformDays(store, clock=clock, student=student, counts=DayCounts(4, 1, 0))
    found: list[Measurement] = []
    for day in range(1, 10):
        platform.live(day)
        found.append(platform.measure(day))
    store.engine.dispose()
    assert faults_of(found, steady_from=5) == []
    kinds = found[-1].stored_bytes
    assert all(kinds[kind] > 0 for kind in ("models", "logs", "metrics", "signals", "datasets"))


def test_growth_is_noticed() -> None:
    def at(day: int, rows: int, size: int, memory: int) -> Measurement:
        return Measurement(
            day=day,
            rows={"events": rows, "promotions": 1},
            stored_bytes={"models": size},
            database_bytes=0,
            api_bytes=memory,
            worker_bytes=1,
        )

    steady = [at(day, 100, 1000, 100) for day in range(1, 5)]
    assert faults_of([*steady, at(9, 110, 1100, 105)], steady_from=2) == []
    assert len(faults_of([*steady, at(9, 200, 2000, 200)], steady_from=2)) == 3
