"""How the client handles responses, against a mock transport."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import httpx
import pytest

from services.cli.client import Client, CommandFailed
from services.cli.commands.jobs import memory_rows, parse_assignments
from services.cli.responses import JobResponse

GIB = 2**30


Respond = Callable[[httpx.Request], httpx.Response]


def _client(*responses: httpx.Response | Respond) -> Client:
    remaining = list(responses)

    def respond(request: httpx.Request) -> httpx.Response:
        response = remaining.pop(0)
        return response if isinstance(response, httpx.Response) else response(request)

    return Client("http://api.test", transport=httpx.MockTransport(respond))


def test_a_rejected_job_is_reported_with_the_changes_that_would_fit() -> None:
    alternatives = [
        {"change": "Adafactor", "verdict": "fits", "costs": "another optimizer"},
        {"change": "nothing", "verdict": "does_not_fit", "costs": ""},
    ]
    problem = {
        "title": "The job would run out of memory",
        "detail": "The job needs 72.02 GiB on each rank.",
        "plan": {"alternatives": alternatives},
    }
    with (
        _client(httpx.Response(422, json=problem)) as client,
        pytest.raises(CommandFailed) as failed,
    ):
        client.post("/jobs", json={})
    assert str(failed.value).splitlines() == [
        "The job needs 72.02 GiB on each rank.",
        "These alternatives would fit:",
        "  Adafactor (costs: another optimizer)",
    ]
    assert (failed.value.status, failed.value.problem) == (422, problem)


def test_a_response_that_is_not_a_problem_document_is_quoted() -> None:
    bad_gateway = httpx.Response(502, text="<html>Bad gateway</html>")
    with (
        _client(bad_gateway) as client,
        pytest.raises(CommandFailed, match="502: <html>Bad gateway"),
    ):
        client.get("/jobs")


EVENT_STREAM = {"Content-Type": "text/event-stream"}
STREAM = (
    ": ping\n\n"
    'id: 4\nevent: state\ndata: {"n": 1}\n\n'
    'event: progress\ndata: {"n": 2}\n\n'
    "id: 5\nevent: state\nda"
)


def test_a_broken_stream_resumes_after_the_last_event() -> None:
    last_event_ids: list[str | None] = []

    def broken(request: httpx.Request) -> httpx.Response:
        last_event_ids.append(request.headers.get("Last-Event-ID"))

        def content() -> Iterator[bytes]:
            yield STREAM.encode()
            raise httpx.ReadError("cut")

        return httpx.Response(200, content=content(), headers=EVENT_STREAM)

    def rest(request: httpx.Request) -> httpx.Response:
        last_event_ids.append(request.headers.get("Last-Event-ID"))
        return httpx.Response(
            200, text='id: 5\nevent: state\ndata: {"n": 3}\n\n', headers=EVENT_STREAM
        )

    with _client(broken, rest) as client:
        events = list(client.events("/jobs/job_1/events"))
    assert [(event.id, event.type, event.data["n"]) for event in events] == [
        ("4", "state", 1),
        ("4", "progress", 2),
        ("5", "state", 3),
    ]
    assert last_event_ids == [None, "4"]


def test_a_stream_that_cannot_be_reconnected_ends_with_a_message() -> None:
    def unreachable(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    with _client(*[unreachable] * 6) as client, pytest.raises(CommandFailed, match="stillhouse up"):
        list(client.events("/jobs/job_1/events"))


def test_a_comment_is_not_an_event() -> None:
    stream = ': ping\n\nid: 1\ndata: {"n": 1}\n\n: ping\n\n'
    with _client(httpx.Response(200, text=stream, headers=EVENT_STREAM)) as client:
        assert [event.id for event in client.events("/jobs/job_1/events")] == ["1"]


def test_a_response_that_is_not_an_event_stream_is_reported() -> None:
    page = httpx.Response(200, text="<html>", headers={"Content-Type": "text/html"})
    with _client(page) as client, pytest.raises(CommandFailed, match="is not an event stream"):
        list(client.events("/jobs/job_1/events"))


def test_planned_and_measured_memory_are_shown_together() -> None:
    job = {
        "plan": {
            "peak_bytes": 50 * GIB,
            "verdict": "fits",
            "decisions": [
                {
                    "field": "recipe.compute",
                    "value": "float32",
                    "basis": "measured",
                    "why": "bfloat16 measured 5.6 times slower than float32",
                }
            ],
        },
        "measured": {"0": {"forward": 40 * GIB}, "3": {"forward": 41 * GIB, "backward": 51 * GIB}},
        "diagnosis": {
            "cause": "capacity",
            "confidence": "likely",
            "remedies": [{"change": "Adafactor", "verdict": "fits"}],
        },
    }
    assert memory_rows(cast(JobResponse, job)) == [
        ("planned", "50.00 GiB per rank, fits"),
        (
            "compute",
            "float32 (measured: bfloat16 measured 5.6 times slower than float32)",
        ),
        ("measured", "51.00 GiB on rank 3, the maximum"),
        ("diagnosis", "capacity (likely)"),
        ("remedy", "Adafactor: fits"),
    ]


def test_the_value_of_an_assignment_is_json_or_else_a_string() -> None:
    texts = ["optimizer=adafactor", "optimizer_in_backward=true", "epochs=2.5", "x=a=b"]
    assert parse_assignments(texts) == {
        "optimizer": "adafactor",
        "optimizer_in_backward": True,
        "epochs": 2.5,
        "x": "a=b",
    }
