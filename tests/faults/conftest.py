"""Workers that reach a real Postgres through a proxy, and jobs whose ranks need no torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.shared.datasets.card import DatasetCard, Head, Split
from services.shared.jobs.db.store import Store, open_store
from services.shared.jobs.ids import new_id
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import TeacherSpec
from services.shared.jobs.views import QueuedJob
from services.shared.launch.task import run_job
from services.shared.launch.torchrun import Launch
from tests.factories import create_job
from tests.faults.proxy import PostgresProxy

RANK = Path(__file__).with_name("stub_rank.py")


@pytest.fixture
def proxy(database_url: str) -> Iterator[PostgresProxy]:
    found = PostgresProxy(Path(database_url.split("host=", 1)[1]) / ".s.PGSQL.5432")
    yield found
    found.close()


@pytest.fixture
def store(database_url: str, data_dir: Path) -> Iterator[Store]:
    """The test's own connection to the database, which no fault affects."""
    settings = JobSettings(
        database_url=database_url,
        broker_url="redis://nowhere",
        data_dir=data_dir,
        heartbeat_seconds=0.05,
    )
    found = open_store(settings)
    yield found
    found.engine.dispose()


@pytest.fixture
def worker_store(store: Store, proxy: PostgresProxy) -> Iterator[Store]:
    """A worker's connection to the database, through the proxy."""
    name = store.settings.database_url.split("/", 3)[3].split("?")[0]
    url = f"postgresql+psycopg://postgres@127.0.0.1:{proxy.port}/{name}"
    found = open_store(store.settings.model_copy(update={"database_url": url}))
    yield found
    found.engine.dispose()


@pytest.fixture
def submit(store: Store) -> Callable[..., str]:
    """Store a small job; its name tells its rank when to kill itself."""
    head = Head(name="mood", labels=["bad", "good"])
    card = DatasetCard(
        id=new_id("ds"),
        name="moods",
        heads=[head],
        rows={Split.TRAIN: 8, Split.VALIDATION: 1, Split.TEST: 1},
        label_counts={head.name: {"bad": 5, "good": 5}},
        missing_labels={head.name: 0},
        sha256="0" * 64,
    )
    store.settings.dataset_dir(card.id).mkdir(parents=True)
    store.add_dataset(card)

    def make(name: str, **fields: object) -> str:
        spec = {
            "kind": "teacher",
            "name": name,
            "dataset_id": card.id,
            "model": {"config": {"model_type": "qwen3"}, "tokenizer": {"train": True}},
        }
        return create_job(store, TeacherSpec.model_validate(spec | fields))[0].id

    return make


@pytest.fixture
def work(worker_store: Store, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[QueuedJob]]:
    """Do what a worker does with one message, with one small rank in place of torchrun."""

    def plan(module: str, run_dir: Path, **_: object) -> Launch:
        return Launch([sys.executable, str(RANK), str(run_dir)], env=dict(os.environ), warnings=[])

    monkeypatch.setattr("services.shared.launch.task.plan_launch", plan)
    monkeypatch.setattr("services.shared.launch.task._FIRST_PAUSE_SECONDS", 0.02)

    def run(job_id: str, stopping: Callable[[], bool] = lambda: False) -> list[QueuedJob]:
        sent: list[QueuedJob] = []
        run_job(
            job_id,
            store=worker_store,
            module="unused",
            worker="w",
            stopping=stopping,
            send=sent.append,
        )
        return sent

    return run
