"""Databases of every former schema are upgraded with their data, and former code works beside the newest schema.

tests/data/schemas holds every statement, with its parameters, by which the code of each schema brought a job into
each state, made a model and promoted it; recorded from that code.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from services.cli.embedded.servers import Server
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.migrations.upgrade import make_schema, migrate
from services.shared.jobs.db.store import Store, open_store
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.state import TERMINAL, JobState

SCHEMAS = Path(__file__).parents[2] / "data" / "schemas"
VERSIONS = sorted(path.stem.removeprefix("v") for path in SCHEMAS.glob("v*.json"))


def recorded(version: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((SCHEMAS / f"v{version}.json").read_text())
    return found


def decoded(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {"json"}:
        return Jsonb(value["json"])
    if isinstance(value, dict) and set(value) == {"seconds"}:
        return timedelta(seconds=value["seconds"])
    return value


def replay(url: str, version: str) -> dict[str, str]:
    """Run the statements of former code; return its jobs by state."""
    record = recorded(version)
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        for statement, parameters in record["statements"]:
            values = {name: decoded(value) for name, value in parameters.items()}
            connection.execute(statement, values)
    jobs: dict[str, str] = record["jobs"]
    return jobs


@pytest.fixture
def empty_url(postgres: Server) -> Iterator[str]:
    """A database that was never migrated."""
    admin = postgres.url.replace("+psycopg", "").replace("/stillhouse?", "/postgres?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE DATABASE former TEMPLATE template0")
    yield postgres.url.replace("/stillhouse?", "/former?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("DROP DATABASE former WITH (FORCE)")


def check(url: str, jobs: dict[str, str], data_dir: Path) -> None:
    """Read everything with the newest code, and go on with it."""
    store = open_store(JobSettings(database_url=url, broker_url="redis://x", data_dir=data_dir))
    try:
        _check_reads(store, jobs)
        _check_writes(store, jobs)
    finally:
        store.engine.dispose()


def _check_reads(store: Store, jobs: dict[str, str]) -> None:
    assert set(jobs) == {str(state) for state in JobState}
    assert {state: str(store.job(job_id).state) for state, job_id in jobs.items()} == {
        state: state for state in jobs
    }
    listed = {job.id for job in store.list_jobs(limit=500).items}
    assert set(jobs.values()) <= listed
    model = store.model(jobs["succeeded"])
    assert [p.model_id for p in store.promotions().items] == [model.id]
    assert store.list_datasets().items
    events = store.events(jobs["failed"])
    assert [event.data.get("state") for event in events][-1] == "failed"


def _check_writes(store: Store, jobs: dict[str, str]) -> None:
    claim = store.claim(jobs["queued"], worker="new", lease_seconds=60)
    assert claim is not None
    store.request_cancel(jobs["waiting"])
    lifecycle = LifecycleStore(store)
    lifecycle.delete("job", jobs["failed"], by="ops")
    lost = store.end_lost_attempts(now=lifecycle.now() + timedelta(hours=2))
    assert jobs["running"] in {job.job_id for job in lost}
    assert store.job(jobs["cancelling"]).state in TERMINAL


def test_there_is_a_record_of_each_released_schema() -> None:
    assert VERSIONS == ["0001", "0002", "0003"]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_database_of_a_former_schema_keeps_its_data(
    empty_url: str, data_dir: Path, version: str
) -> None:
    make_schema(empty_url, revision=version)
    jobs = replay(empty_url, version)
    migrate(empty_url)
    check(empty_url, jobs, data_dir)


@pytest.mark.parametrize("version", VERSIONS)
def test_former_code_works_with_the_newest_schema_during_a_rolling_update(
    database_url: str, data_dir: Path, version: str
) -> None:
    jobs = replay(database_url, version)
    check(database_url, jobs, data_dir)


def test_a_downgrade_keeps_what_the_former_schema_knows(empty_url: str, data_dir: Path) -> None:
    migrate(empty_url)
    jobs = replay(empty_url, "0003")
    migrate(empty_url, target="0003")
    migrate(empty_url)
    check(empty_url, jobs, data_dir)
