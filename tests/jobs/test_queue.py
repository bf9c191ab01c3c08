"""Messages on a real Valkey."""

from __future__ import annotations

from pathlib import Path

import pytest
from celery import Celery

from services.cli.embedded.servers import start_valkey
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.queue import TASK, depth, make_celery, send
from services.shared.jobs.settings import JobSettings


def _app(broker_url: str, data_dir: Path) -> Celery:
    return make_celery(
        JobSettings(database_url="postgresql://unused", broker_url=broker_url, data_dir=data_dir)
    )


def test_a_job_is_sent_as_its_id_to_the_queue_of_its_kind(broker_url: str, data_dir: Path) -> None:
    app = _app(broker_url, data_dir)
    assert depth(app, "teacher") == 0
    assert send(app, "job_1", "teacher")
    assert send(app, "job_2", "teacher")
    assert (depth(app, "teacher"), depth(app, "distill")) == (2, 0)
    with app.connection_for_read() as connection:
        message = connection.SimpleQueue("trainer").get(timeout=5)
    assert message.headers["task"] == TASK
    assert message.content_type == "application/json"
    assert message.payload[:2] == [["job_1"], {}]


def test_an_unreachable_broker_loses_only_the_message(tmp_path: Path) -> None:
    app = _app("redis://127.0.0.1:1/0", tmp_path)
    assert send(app, "job_1", "teacher") is False
    with pytest.raises(Unavailable):
        depth(app, "teacher")


def test_sending_survives_a_restart_of_the_broker(tmp_path: Path) -> None:
    server = start_valkey(tmp_path)
    app = _app(server.url, tmp_path)
    assert send(app, "job_1", "distill")
    server.stop()
    assert send(app, "job_2", "distill") is False
    server = start_valkey(tmp_path)
    try:
        assert send(app, "job_3", "distill")
        assert depth(app, "distill") == 2
    finally:
        app.pool.force_close_all()
        server.stop()


def test_only_json_is_read_and_messages_are_acknowledged_late(tmp_path: Path) -> None:
    conf = _app("redis://127.0.0.1:1/0", tmp_path).conf
    assert conf.accept_content == ["json"]
    assert conf.task_acks_late
    assert conf.worker_prefetch_multiplier == conf.worker_concurrency == 1
