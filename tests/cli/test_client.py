"""What the client makes of answers; no API is needed for that."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.cli.client import Client, Refused
from services.cli.commands.jobs import _assignments, _memory_rows

GIB = 2**30


def _client(*answers: Any) -> Client:
    left = list(answers)

    def answer(request: httpx.Request) -> httpx.Response:
        given = left.pop(0)
        return given(request) if callable(given) else given

    client = Client("http://api.test")
    client._http = httpx.Client(base_url="http://api.test", transport=httpx.MockTransport(answer))
    return client


def test_a_refused_job_is_told_the_changes_that_would_fit() -> None:
    alternatives = [
        {"change": "Adafactor", "verdict": "fits", "costs": "another optimizer"},
        {"change": "nothing", "verdict": "does_not_fit", "costs": ""},
    ]
    problem = {
        "title": "The job would run out of memory",
        "detail": "The job needs 72.02 GiB on each rank.",
        "plan": {"alternatives": alternatives},
    }
    with _client(httpx.Response(422, json=problem)) as client, pytest.raises(Refused) as refused:
        client.post("/jobs", json={})
    assert str(refused.value).splitlines() == [
        "The job needs 72.02 GiB on each rank.",
        "These would fit:",
        "  Adafactor (costs: another optimizer)",
    ]
    assert (refused.value.status, refused.value.problem) == (422, problem)


def test_an_answer_that_is_no_problem_document_is_quoted() -> None:
    bad_gateway = httpx.Response(502, text="<html>Bad gateway</html>")
    with _client(bad_gateway) as client, pytest.raises(Refused, match="502: <html>Bad gateway"):
        client.get("/jobs")


STREAM = (
    ": ping\n\n"
    'id: 4\nevent: state\ndata: {"n": 1}\n\n'
    'event: progress\ndata: {"n": 2}\n\n'
    "id: 5\nevent: state\nda"
)


def test_a_broken_stream_goes_on_after_the_last_event_seen() -> None:
    asked: list[str | None] = []

    def broken(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("Last-Event-ID"))

        def content() -> Any:
            yield STREAM.encode()
            raise httpx.ReadError("cut")

        return httpx.Response(200, content=content())

    def rest(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers.get("Last-Event-ID"))
        return httpx.Response(200, text='id: 5\nevent: state\ndata: {"n": 3}\n\n')

    with _client(broken, rest) as client:
        events = list(client.events("/jobs/job_1/events"))
    assert [(event.id, event.type, event.data["n"]) for event in events] == [
        ("4", "state", 1),
        ("", "progress", 2),
        ("5", "state", 3),
    ]
    assert asked == [None, "4"]


def test_a_stream_that_never_comes_back_ends_with_a_sentence() -> None:
    def silent(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with _client(*[silent] * 6) as client, pytest.raises(Refused, match="stillhouse up"):
        list(client.events("/jobs/job_1/events"))


def test_planned_and_measured_memory_stand_side_by_side() -> None:
    job = {
        "plan": {"peak_bytes": 50 * GIB, "verdict": "fits"},
        "measured": {"0": {"forward": 40 * GIB}, "3": {"forward": 41 * GIB, "backward": 51 * GIB}},
        "diagnosis": {
            "cause": "capacity",
            "confidence": "likely",
            "remedies": [{"change": "Adafactor", "verdict": "fits"}],
        },
    }
    assert _memory_rows(job) == [
        ("planned", "50.00 GiB a rank, fits"),
        ("measured", "51.00 GiB on rank 3, the highest"),
        ("diagnosis", "capacity (likely)"),
        ("remedy", "Adafactor: fits"),
    ]


def test_a_change_is_json_where_it_is_json_and_text_elsewhere() -> None:
    texts = ["optimizer=adafactor", "optimizer_in_backward=true", "epochs=2.5", "x=a=b"]
    assert _assignments(texts) == {
        "optimizer": "adafactor",
        "optimizer_in_backward": True,
        "epochs": 2.5,
        "x": "a=b",
    }
