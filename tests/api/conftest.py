"""Platforms with and without a database, and students for their predictors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from services.api.settings import ApiSettings
from services.shared.jobs.db.connection import create_engine
from services.shared.jobs.db.store import Store
from tests.api.fakes import FakeAdmission, FakeStudent
from tests.api.harness import JobDriver, Platform
from tests.factories import DOMAIN, SENTIMENT

NOWHERE = "postgresql+psycopg://nobody@127.0.0.1:1/nothing?connect_timeout=1"


def _settings(database_url: str, tmp_path: Path) -> ApiSettings:
    roots = tmp_path / "roots"
    roots.mkdir()
    data_dir = tmp_path / "data"
    for name in ("datasets", "uploads"):
        (data_dir / name).mkdir(parents=True)
    return ApiSettings(
        database_url=database_url,
        broker_url="redis://127.0.0.1:1/0",
        data_dir=data_dir,
        model_roots=[roots],
        event_poll_seconds=0.01,
    )


@pytest.fixture(autouse=True, scope="session")
def plain_logs() -> Iterator[None]:
    """Render exceptions without local variables, as the server does; structlog's default takes seconds."""
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()]
    )
    yield
    structlog.reset_defaults()


@pytest.fixture
def offline(tmp_path: Path) -> Iterator[Platform]:
    """A platform whose database is unreachable."""
    settings = _settings(NOWHERE, tmp_path)
    engine = create_engine(NOWHERE)
    yield Platform(settings=settings, store=Store(engine, settings))
    engine.dispose()


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    """A platform with a migrated database of its own."""
    settings = _settings(database_url, tmp_path)
    engine = create_engine(database_url)
    store = Store(engine, settings)
    yield Platform(settings=settings, store=store, fake_admission=FakeAdmission(store))
    engine.dispose()


@pytest.fixture
def one_head() -> FakeStudent:
    """A student with one head."""
    return FakeStudent("reviews", "mdl_1_1", [SENTIMENT])


@pytest.fixture
def two_heads() -> FakeStudent:
    """A student with two heads."""
    return FakeStudent("reviews", "mdl_2_1", [SENTIMENT, DOMAIN])


@pytest.fixture
def desk(platform: Platform) -> JobDriver:
    """A driver of jobs on `platform`."""
    return JobDriver(platform)
