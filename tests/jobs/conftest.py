"""A store on a fresh database, and short ways to bring a job into any state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from services.cli.embedded.servers import Server
from services.shared.datasets.card import Head
from services.shared.jobs.db.store import Store, open_store
from services.shared.jobs.db.tables import Table
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import ChainSpec, DistillSpec, TeacherSpec
from services.shared.jobs.state import JobState, Reason
from services.shared.jobs.views import Claim, JobView
from tests.factories import (
    SENTIMENT,
    create_chain,
    create_job,
    dataset_card,
    failed,
    retry_job,
    succeeded,
    write_artifact,
)

BACKBONE = {"config": {"model_type": "qwen3"}, "tokenizer": {"train": True, "vocab_size": 300}}


class StoreDriver:
    """A store, and shortcuts that bring a job into any state."""

    def __init__(self, settings: JobSettings) -> None:
        self.settings = settings
        self.store: Store = open_store(settings)
        self.dataset_id = self.add_dataset()

    def add_dataset(self, heads: tuple[Head, ...] = (SENTIMENT,), **fields: Any) -> str:
        """Register a dataset and make its directory."""
        card = dataset_card(heads).model_copy(update=fields)
        self.settings.dataset_dir(card.id).mkdir(parents=True)
        return self.store.add_dataset(card).id

    def teacher_spec(self, **fields: Any) -> TeacherSpec:
        """A teacher job on the dataset."""
        whole = {"kind": "teacher", "dataset_id": self.dataset_id, "model": BACKBONE}
        return TeacherSpec.model_validate(whole | fields)

    def distill_spec(self, teacher: dict[str, str], **fields: Any) -> DistillSpec:
        """A distillation of `teacher` ({"job_id": ...} or {"model_id": ...}) on the dataset."""
        whole = {
            "kind": "distill",
            "dataset_id": self.dataset_id,
            "teacher": teacher,
            "student": BACKBONE,
        }
        return DistillSpec.model_validate(whole | fields)

    def queued(self, **fields: Any) -> JobView:
        """A teacher job that waits for a worker."""
        return self.create_job(self.teacher_spec(**fields))[0]

    def claim(self, job_id: str, *, worker: str = "worker-1") -> Claim:
        """Claim a queued job with a lease of a minute."""
        claim = self.store.claim(job_id, worker=worker, lease_seconds=60)
        assert claim is not None
        return claim

    def create_job(self, spec: TeacherSpec | DistillSpec, **options: Any) -> tuple[JobView, bool]:
        return create_job(self.store, spec, **options)

    def create_chain(self, chain: ChainSpec, **options: Any) -> tuple[JobView, bool]:
        return create_chain(self.store, chain, **options)

    def retry(self, job_id: str, **changes: Any) -> JobView:
        return retry_job(self.store, job_id, **changes)[0]

    def running(self, **fields: Any) -> Claim:
        """A teacher job that a worker has claimed."""
        return self.claim(self.queued(**fields).id)

    def succeed(self, claim: Claim, evaluation: dict[str, Any] | None = None) -> str:
        """Finish a job successfully; return the id of its model, whose artifact is in its directory."""
        write_artifact(self.settings, claim.model_id)
        finished = self.store.finish(claim, succeeded(evaluation))
        assert finished.applied
        return claim.model_id

    def in_state(self, state: JobState) -> str:
        """Return a job brought into `state` by the store's own operations."""
        if state is JobState.WAITING:
            parent = self.queued()
            child, _ = self.create_job(self.distill_spec({"job_id": parent.id}))
            return child.id
        if state is JobState.QUEUED:
            return self.queued().id
        claim = self.running()
        if state in (JobState.CANCELLING, JobState.CANCELLED):
            self.store.request_cancel(claim.job_id)
        if state is JobState.CANCELLED:
            self.store.finish(claim, Outcome(end=End.CANCELLED, reason=Reason.CANCELLED))
        if state is JobState.FAILED:
            self.store.finish(claim, failed())
        if state is JobState.SUCCEEDED:
            self.succeed(claim)
        return claim.job_id


@pytest.fixture(scope="session")
def emptied_database(migrated: Server) -> str:
    """A database that each of these tests empties, which is faster than a new one for each."""
    admin = migrated.url.replace("+psycopg", "").replace("/stillhouse?", "/postgres?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE DATABASE jobs_tests TEMPLATE stillhouse STRATEGY file_copy")
    return migrated.url.replace("/stillhouse?", "/jobs_tests?")


@pytest.fixture
def database_url(emptied_database: str) -> str:
    with psycopg.connect(emptied_database.replace("+psycopg", "")) as connection:
        # As a replica does: without the triggers that guard foreign keys and promotions.
        connection.execute("SET session_replication_role = replica")
        for table in Table.metadata.tables:
            connection.execute(sql.SQL("DELETE FROM {}").format(sql.Identifier(table)))
    return emptied_database


@pytest.fixture
def settings(database_url: str, data_dir: Path) -> JobSettings:
    return JobSettings(
        database_url=database_url, broker_url="redis://127.0.0.1:1/0", data_dir=data_dir
    )


@pytest.fixture
def driver(settings: JobSettings) -> Iterator[StoreDriver]:
    driver = StoreDriver(settings)
    yield driver
    driver.store.engine.dispose()


class AtOnce:
    """Calls from many threads that start together."""

    def __call__(self, count: int, call: Callable[[int], Any]) -> list[Any]:
        """Return what each call returned, in any order; the first failure is raised."""
        barrier = threading.Barrier(count)

        def run(number: int) -> Any:
            barrier.wait()
            return call(number)

        with ThreadPoolExecutor(count) as pool:
            return [future.result() for future in [pool.submit(run, n) for n in range(count)]]


@pytest.fixture
def at_once() -> AtOnce:
    return AtOnce()
