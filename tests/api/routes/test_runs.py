"""The output of a job's runs: events, logs, memory, metrics."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from services.api.app import create_app
from services.api.downsampling import downsample
from services.api.settings import ApiSettings
from services.shared.jobs.label_quality import HeadQuality, LabelQuality, SuspectLabel
from services.shared.jobs.run_directory import (
    MemoryRecord,
    ProgressRecord,
    RunDirectory,
    append_record,
    write_json,
)
from services.shared.jobs.state import Phase
from tests.api.harness import JobDriver


def events_of(text: str) -> list[dict[str, str]]:
    """Parse an event stream that has ended; comments have no place in it."""
    parsed = []
    for block in text.replace("\r\n", "\n").strip().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            parsed.append(dict(line.split(": ", 1) for line in lines))
    return parsed


def run_of(desk: JobDriver, claim: Any) -> RunDirectory:
    return RunDirectory(desk.platform.settings.run_dir(claim.job_id, claim.attempt))


def test_the_stream_replays_every_transition_and_ends_with_the_job(desk: JobDriver) -> None:
    claim = desk.running()
    desk.store.heartbeat(claim, phase=Phase.TRAINING, lease_seconds=60)
    desk.fail(claim)
    response = desk.client.get(f"/jobs/{claim.job_id}/events")
    assert response.headers["content-type"].startswith("text/event-stream")
    received = [
        (event["event"], json.loads(event["data"])["data"]) for event in events_of(response.text)
    ]
    assert [data.get("state") for kind, data in received if kind == "state"] == [
        "queued",
        "running",
        "failed",
    ]
    assert ("phase", {"phase": "training"}) in received
    assert received[-1][1]["reason"] == "device_out_of_memory"


def test_the_stream_resumes_after_the_last_event_id(desk: JobDriver) -> None:
    claim = desk.running()
    desk.fail(claim)
    path = f"/jobs/{claim.job_id}/events"
    everything = events_of(desk.client.get(path).text)
    for place, event in enumerate(everything):
        rest = events_of(desk.client.get(path, headers={"Last-Event-ID": event["id"]}).text)
        assert rest == everything[place + 1 :]


def test_a_stream_from_beyond_the_end_ends_too(desk: JobDriver) -> None:
    claim = desk.running()
    desk.fail(claim)
    headers = {"Last-Event-ID": str(2**62)}
    assert desk.client.get(f"/jobs/{claim.job_id}/events", headers=headers).text == ""


@pytest.mark.parametrize("last", ["-1", "x", str(2**63), ""])
def test_an_impossible_last_event_is_refused(desk: JobDriver, last: str) -> None:
    claim = desk.running()
    response = desk.client.get(f"/jobs/{claim.job_id}/events", headers={"Last-Event-ID": last})
    assert response.status_code == 422


def test_json_gives_the_events_so_far_as_a_list(desk: JobDriver) -> None:
    claim = desk.running()
    response = desk.client.get(
        f"/jobs/{claim.job_id}/events", headers={"Accept": "application/json"}
    )
    assert response.headers["content-type"] == "application/json"
    assert [event["data"]["state"] for event in response.json()] == ["queued", "running"]


@contextmanager
def served(platform: Any, **settings: Any) -> Iterator[str]:
    """The application behind a real server on a free port."""
    platform.settings = ApiSettings(**{**platform.settings.model_dump(), **settings})
    config = uvicorn.Config(
        create_app(platform.context()), port=0, log_level="critical", timeout_graceful_shutdown=5
    )
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        socket.close()
        assert not thread.is_alive(), "the server did not stop"


def test_a_watcher_sees_what_happens_while_it_watches(desk: JobDriver) -> None:
    claim = desk.running()
    seen: list[str] = []
    with (
        served(desk.platform, event_ping_seconds=0.05) as url,
        httpx.stream("GET", f"{url}/jobs/{claim.job_id}/events", timeout=20) as response,
    ):
        for line in response.iter_lines():
            seen.append(line)
            if line == "event: progress":
                desk.fail(claim)
            elif line.startswith(":") and not any("step" in text for text in seen):
                # A heartbeat has come, so the stream is idle and open: now something happens.
                desk.store.heartbeat(claim, progress={"step": 5}, lease_seconds=60)
    data = [json.loads(line.removeprefix("data: ")) for line in seen if line.startswith("data")]
    assert [event["data"]["state"] for event in data if "data" in event] == [
        "queued",
        "running",
        "failed",
    ]
    assert [event["progress"]["step"] for event in data if "progress" in event] == [5]


def test_an_open_stream_does_not_keep_the_server_from_stopping(desk: JobDriver) -> None:
    claim = desk.running()
    with served(desk.platform) as url, httpx.Client(timeout=20) as client:
        request = client.build_request("GET", f"{url}/jobs/{claim.job_id}/events")
        response = client.send(request, stream=True)
        assert next(response.iter_lines()).startswith("id: ")
    # `served` has asserted that the server stopped


def test_the_log_is_read_from_its_end_in_whole_lines(desk: JobDriver) -> None:
    claim = desk.running()
    log = run_of(desk, claim).log
    log.parent.mkdir(parents=True)
    log.write_bytes(b"first line\n" + "第二行\n".encode() + b"broken \xff\n")
    path = f"/jobs/{claim.job_id}/logs"
    assert desk.client.get(path).text == "first line\n第二行\nbroken \ufffd\n"
    assert desk.client.get(f"{path}?tail_bytes=12").text == "broken \ufffd\n"
    assert desk.client.get(path).headers["content-type"] == "text/plain; charset=utf-8"


def test_before_anything_is_printed_the_log_is_empty(desk: JobDriver) -> None:
    job_id = desk.submit().json()["id"]
    assert desk.client.get(f"/jobs/{job_id}/logs").text == ""
    claim = desk.store.claim(job_id, worker="w", lease_seconds=60)
    assert claim is not None
    assert desk.client.get(f"/jobs/{claim.job_id}/logs").text == ""


@pytest.mark.parametrize("sub", ["logs", "memory", "metrics"])
def test_an_attempt_that_does_not_exist_is_not_found(desk: JobDriver, sub: str) -> None:
    claim = desk.running()
    assert desk.client.get(f"/jobs/{claim.job_id}/{sub}?attempt=1").status_code == 200
    assert desk.client.get(f"/jobs/{claim.job_id}/{sub}?attempt=2").status_code == 404
    assert desk.client.get(f"/jobs/{claim.job_id}/{sub}?attempt=0").status_code == 422


def test_memory_compares_the_plan_with_the_measurements_of_each_rank(desk: JobDriver) -> None:
    claim = desk.running()
    run = run_of(desk, claim)
    for rank in (0, 1):
        for step in range(3):
            record = MemoryRecord(
                time=step, phase="forward", step=step, peak_allocated_bytes=100 * rank + step
            )
            append_record(run.memory_file(rank), record)
    append_record(run.memory_file(1), MemoryRecord(time=3, phase="load", peak_allocated_bytes=50))
    body = desk.client.get(f"/jobs/{claim.job_id}/memory").json()
    assert body["planned_peak_bytes"] == 7
    assert [rank["rank"] for rank in body["ranks"]] == [0, 1]
    assert body["ranks"][1]["phases"] == {
        "forward": {"planned_bytes": 7, "measured_bytes": 102, "comparable": False},
        "load": {"planned_bytes": None, "measured_bytes": 50, "comparable": False},
    }
    assert body["ranks"][1]["peak_allocated_bytes"] == 102
    assert len(body["ranks"][0]["series"]["points"]) == 3


def test_metrics_keep_every_evaluation_and_downsample_the_rest(desk: JobDriver) -> None:
    claim = desk.running()
    run = run_of(desk, claim)
    for step in range(50):
        append_record(run.progress, ProgressRecord(time=step, phase=Phase.TRAINING, step=step))
        if step % 10 == 0:
            evaluation = {"heads": {"sentiment": {"macro_f1": step / 50}}}
            append_record(
                run.progress,
                ProgressRecord(time=step, phase=Phase.EVALUATING, evaluation=evaluation),
            )
    body = desk.client.get(f"/jobs/{claim.job_id}/metrics?points=10").json()
    assert len(body["evaluations"]) == 5
    assert body["series"]["total"] == 50
    assert len(body["series"]["points"]) <= 11
    assert body["series"]["points"][-1]["step"] == 49


@pytest.mark.parametrize("total", [0, 1, 2, 9, 10, 11, 100, 1001])
def test_downsampling_keeps_the_first_the_last_and_even_steps(total: int) -> None:
    records = [MemoryRecord(time=0, phase="x", step=step) for step in range(total)]
    series = downsample(records, points=10)
    steps = [record.step for record in series.points]
    assert series.total == total
    assert len(steps) <= 11
    assert steps[:1] == [0][:total]
    assert steps[-1:] == list(range(total))[-1:]
    assert {later - earlier for earlier, later in pairwise(steps[:-1])} <= {series.stride}


def test_a_partial_line_at_the_end_of_a_file_is_skipped(desk: JobDriver) -> None:
    claim = desk.running()
    file: Path = run_of(desk, claim).memory_file(0)
    append_record(file, MemoryRecord(time=0, phase="load"))
    with file.open("ab") as half:
        half.write(b'{"time": 1, "pha')
    body = desk.client.get(f"/jobs/{claim.job_id}/memory").json()
    assert body["ranks"][0]["series"]["total"] == 1


def test_the_label_quality_of_a_trained_teacher_is_listed(desk: JobDriver) -> None:
    claim = desk.running()
    path = f"/jobs/{claim.job_id}/label-quality"
    assert desk.client.get(path).status_code == 404
    suspect = SuspectLabel(
        split="train",
        line=7,
        head="sentiment",
        text="fine",
        given=["negative"],
        suggested=["positive"],
        score=0.01,
        suggested_score=0.99,
        basis="out_of_fold_baseline",
    )
    head = HeadQuality(out_of_fold_texts=9, model_texts=0, suspects=1)
    quality = LabelQuality(
        heads={"sentiment": head},
        suspects=[suspect],
        num_duplicates=0,
        duplicates=[],
        num_contradictions=0,
        contradictions=[],
    )
    write_json(run_of(desk, claim).label_quality, quality)
    body = desk.client.get(path).json()
    assert body == quality.model_dump() | {"job_id": claim.job_id, "attempt": 1}
