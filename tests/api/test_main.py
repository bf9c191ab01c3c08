"""The application with Postgres, Valkey and the promotion feed; settings with which it does not start."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from services.api.main import create
from services.api.promotions import PAGE, PromotionFeed
from services.api.settings import ApiSettings
from services.shared.jobs.db.connection import ProjectSession
from services.shared.jobs.db.model_queries import promote
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.gates import HeadComparison, Int8Gate
from services.shared.jobs.queue import depth, make_celery
from services.shared.jobs.views import ServingView
from tests.api.harness import JobDriver

GATE = Int8Gate(
    passed=False,
    calibration_texts=128,
    heads={
        "sentiment": HeadComparison(
            texts=500, agreement=0.98, macro_f1=0.9, macro_f1_float32=0.91, passed=False
        )
    },
)


@pytest.fixture
def settings(database_url: str, broker_url: str, data_dir: Path) -> ApiSettings:
    return ApiSettings(database_url=database_url, broker_url=broker_url, data_dir=data_dir)


@pytest.fixture
def client(settings: ApiSettings) -> Iterator[TestClient]:
    with TestClient(create(settings), base_url="http://127.0.0.1") as client:
        yield client


def test_every_dependency_responds(client: TestClient) -> None:
    parts = client.get("/readyz").json()["parts"]
    assert {name: part["ok"] for name, part in parts.items()} == {
        "database": True,
        "broker": True,
        "data_dir": True,
        "epoch": True,
        "schema": True,
    }


def test_a_submitted_job_is_queued_for_its_worker(
    client: TestClient, settings: ApiSettings
) -> None:
    rows = "".join(f'{{"text": "t{n}", "head": "{n % 2}"}}\n' for n in range(20))
    files = {"file": ("a.jsonl", rows.encode())}
    dataset = client.post("/datasets", files=files, data={"heads": '[{"name": "head"}]'}).json()
    model = {"config": {"model_type": "qwen3"}, "tokenizer": {"train": True}}
    body = {"kind": "teacher", "dataset_id": dataset["id"], "model": model}
    assert client.post("/jobs", json=body).status_code == 202
    assert depth(make_celery(settings), "teacher") == 1


def test_serving_metrics_are_in_the_same_registry(client: TestClient) -> None:
    assert "stillhouse_serving_queue_tokens 0.0" in client.get("/metrics").text


def test_the_feed_reads_each_promotion_once_newest_first(desk: JobDriver) -> None:
    model_id = desk.succeed(desk.running())
    feed = PromotionFeed(desk.store)
    assert feed() == []
    for _ in range(PAGE + 5):
        desk.store.promote(model_id)
    desk.store.promote(model_id, alias="challenger")
    first = feed()
    assert len(first) == PAGE + 6
    assert (first[0].alias, first[0].version) == ("challenger", model_id)
    assert first[0].directory == desk.platform.settings.model_dir(model_id)
    assert feed() == first
    newest = desk.store.promote(model_id)
    assert [promoted.promotion_id for promoted in feed()] == [
        newest.id,
        *(promoted.promotion_id for promoted in first),
    ]


def test_a_promotion_that_commits_after_a_newer_one_is_not_lost(desk: JobDriver) -> None:
    model_id = desk.succeed(desk.running())
    feed = PromotionFeed(desk.store)
    desk.store.promote(model_id)
    feed()
    with ProjectSession(
        desk.store.engine, info={"project": None}
    ) as session:  # takes its number now, commits later
        model = desk.store.model(model_id)
        late = promote(session, model, alias="late", force=False, reason=None, actor=None)
        newest = desk.store.promote(model_id)
        assert feed()[0].promotion_id == newest.id
        session.commit()
    assert [promoted.promotion_id for promoted in feed()][:2] == [newest.id, late.id]


def test_the_feed_stores_the_outcomes_of_promotions(desk: JobDriver) -> None:
    model_id = desk.succeed(desk.running())
    desk.store.promote(model_id)
    feed = PromotionFeed(desk.store)
    [promoted] = feed()
    feed.on_refused(promoted, "it answers otherwise", transient=False)
    feed.on_int8_gate(promoted, GATE)
    assert desk.client.get(f"/models/{model_id}").json()["serving"] == {}
    feed()
    [shown] = desk.client.get("/models").json()["items"]
    assert shown["serving"]["default"]["outcome"] == "refused"
    assert shown["serving"]["default"]["why"] == "it answers otherwise"
    assert shown["int8_gate"] == GATE.model_dump()
    [listed] = desk.client.get("/promotions").json()["items"]
    assert listed["serving"] == shown["serving"]["default"]
    feed.on_served(promoted, engine="packed-bfloat16")
    feed()
    [listed] = desk.client.get("/promotions").json()["items"]
    assert (listed["serving"]["outcome"], listed["serving"]["engine"]) == (
        "served",
        "packed-bfloat16",
    )


def test_outcomes_reported_during_a_database_outage_are_stored_later_in_order(
    desk: JobDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_id = desk.succeed(desk.running())
    desk.store.promote(model_id)
    feed = PromotionFeed(desk.store)
    [promoted] = feed()

    failures = [Unavailable("away")]
    write = desk.store.report_refused

    def flaky(*args: Any, **fields: Any) -> None:
        if failures:
            raise failures.pop()
        write(*args, **fields)

    monkeypatch.setattr(desk.store, "report_refused", flaky)
    feed.on_refused(promoted, "no room", transient=True)
    feed.on_served(promoted, engine="packed-float32")
    with pytest.raises(Unavailable):
        feed()
    assert active_serving(desk) is None
    feed()
    serving = active_serving(desk)
    assert serving is not None
    assert serving.outcome == "served"


def active_serving(desk: JobDriver) -> ServingView | None:
    promotion = desk.store.active()
    assert promotion is not None
    return promotion.serving


def start(**environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith("STILLHOUSE_")}
    return subprocess.run(
        [sys.executable, "-m", "services.api.main"],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_missing_setting_is_named(tmp_path: Path) -> None:
    done = start(STILLHOUSE_DATA_DIR=str(tmp_path), STILLHOUSE_PORT="many")
    assert done.returncode == 1
    for name in ("STILLHOUSE_DATABASE_URL", "STILLHOUSE_BROKER_URL", "STILLHOUSE_PORT"):
        assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_the_server_does_not_start_on_a_network_without_keys(tmp_path: Path) -> None:
    done = start(
        STILLHOUSE_DATA_DIR=str(tmp_path),
        STILLHOUSE_DATABASE_URL="postgresql://x",
        STILLHOUSE_BROKER_URL="redis://x",
        STILLHOUSE_HOST="0.0.0.0",
    )
    assert done.returncode == 1
    assert "Refusing to listen on 0.0.0.0" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_invalid_serving_setting_is_named(tmp_path: Path) -> None:
    done = start(
        STILLHOUSE_DATA_DIR=str(tmp_path),
        STILLHOUSE_DATABASE_URL="postgresql://x",
        STILLHOUSE_BROKER_URL="redis://x",
        STILLHOUSE_SERVING_LANES="-1",
    )
    assert done.returncode == 1
    assert "STILLHOUSE_SERVING_LANES" in done.stderr
    assert "Traceback" not in done.stderr
