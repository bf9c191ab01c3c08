"""A client of the API for the commands: JSON in, JSON out, and errors as readable messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import httpx
import typer
from httpx_sse import SSEError, connect_sse

from services.cli.responses import ProblemResponse
from services.cli.terminal import Console

TIMEOUT_SECONDS = 120.0  # an upload is validated row by row before the response
_STREAM_TIMEOUT_SECONDS = 60.0  # the server sends a comment on an idle event stream every 15 s
_MAX_STREAM_FAILURES = 5  # in a row, without an event between them

Url = Annotated[str, typer.Option("--url", envvar="STILLHOUSE_URL", help="URL of the API.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        "--api-key", envvar="STILLHOUSE_API_KEY", help="API key, if the server requires one."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for machines.")]
DEFAULT_URL = "http://127.0.0.1:8000"


class CommandFailed(Exception):
    """A command could not do what was requested: a message for users, a problem document for programs."""

    def __init__(
        self, message: str, *, status: int | None = None, problem: ProblemResponse | None = None
    ) -> None:
        super().__init__(message)
        self.status = status  # of HTTP; None where there was no response
        self.problem = problem


@dataclass(frozen=True)
class ServerEvent:
    """An event of a stream; `id` is that of the last event that the server can replay, or empty."""

    type: str
    data: dict[str, Any]
    id: str


class Client:
    """A connection to the API, used as a context manager. Every method raises CommandFailed."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._url = url
        self._http = httpx.Client(
            base_url=url, headers=headers, timeout=TIMEOUT_SECONDS, transport=transport
        )

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def get(self, path: str, *, params: Mapping[str, Any] | None = None) -> Any:
        """Return the JSON document at `path`; parameters that are None are not sent."""
        return self._request("GET", path, params=params)

    def post(
        self,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        json: Any = None,
        data: Mapping[str, str] | None = None,
        files: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """Send a JSON body or a form and return the JSON response."""
        return self._request(
            "POST", path, params=params, json=json, data=data, files=files, headers=headers
        )

    def delete(self, path: str) -> Any:
        """Delete what is at `path` and return the JSON response."""
        return self._request("DELETE", path)

    def download(self, path: str, to: Path) -> None:
        """Write the bytes at `path` to a file, in parts as they arrive. Raises OSError too."""
        try:
            with self._http.stream("GET", path) as response, to.open("wb") as file:
                if not response.is_success:
                    response.read()
                    raise _error_from(response)
                for part in response.iter_bytes():
                    file.write(part)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    def events(self, path: str) -> Iterator[ServerEvent]:
        """Yield the events of a stream until the server ends it, reconnecting where it breaks.

        A reconnection sends the id of the last event, so that none is missed or repeated.
        """
        last_event_id = ""
        failures = 0
        while True:
            try:
                for event in self._stream(path, last_event_id):
                    last_event_id = event.id or last_event_id
                    failures = 0
                    yield event
                return
            except SSEError as error:
                raise CommandFailed(f"{self._url}{path} is not an event stream: {error}") from error
            except httpx.HTTPError as error:
                failures += 1
                if failures > _MAX_STREAM_FAILURES:
                    raise self._unreachable(error) from error

    def _stream(self, path: str, last_event_id: str) -> Iterator[ServerEvent]:
        headers = {"Last-Event-ID": last_event_id} if last_event_id else {}
        with connect_sse(
            self._http, "GET", path, headers=headers, timeout=_STREAM_TIMEOUT_SECONDS
        ) as source:
            if not source.response.is_success:
                source.response.read()
                raise _error_from(source.response)
            for event in source.iter_sse():
                if (
                    event.data
                ):  # a comment between two blank lines is decoded as an event without data
                    yield ServerEvent(type=event.event, data=event.json(), id=event.id)

    def _request(
        self, method: str, path: str, *, params: Mapping[str, Any] | None = None, **content: Any
    ) -> Any:
        given = {name: value for name, value in (params or {}).items() if value is not None}
        try:
            response = self._http.request(method, path, params=given, **content)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        if not response.is_success:
            raise _error_from(response)
        return response.json()

    def _unreachable(self, error: httpx.HTTPError) -> CommandFailed:
        return CommandFailed(
            f"{self._url} does not respond ({error or type(error).__name__}). Start a platform with "
            "`stillhouse up`, or select another one with --url."
        )


@contextmanager
def open_client(url: str, api_key: str | None, *, as_json: bool = False) -> Iterator[Client]:
    """Yield a client; a failure prints its message and ends the command with exit code 1."""
    try:
        with Client(url, api_key=api_key) as client:
            yield client
    except CommandFailed as error:
        if as_json and error.problem:
            print_json(error.problem)
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def print_json(value: Any) -> None:
    """Write one JSON document to standard output, for machines."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def _error_from(response: httpx.Response) -> CommandFailed:
    try:
        body = response.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return CommandFailed(
            f"{response.url} returned status {response.status_code}: {response.text[:200]}",
            status=response.status_code,
        )
    problem = cast(ProblemResponse, body)
    return CommandFailed(_format_problem(problem), status=response.status_code, problem=problem)


def _format_problem(problem: ProblemResponse) -> str:
    """Return a problem document as text: what failed, in which fields or lines, and what would fit."""
    lines = [str(problem.get("detail") or problem.get("title") or "The request was rejected.")]
    for error in problem.get("errors") or []:
        lines.append(f"  {error.get('field')}: {error.get('message')}")
    for reference in (problem.get("references") or [])[1:]:
        lines.append(f"  {reference}")
    for fault in problem.get("faults") or []:
        where = "" if fault.get("line") is None else f"line {fault['line']}: "
        lines.append(f"  {where}{fault.get('message')}")
    if found := problem.get("found"):
        lines.append(f"Found: {found}")
    if command := problem.get("command"):
        lines.append(f"Repeat with: {command}")
    plan = problem.get("plan") or {}
    fitting = [a for a in plan.get("alternatives") or [] if a.get("verdict") != "does_not_fit"]
    if fitting:
        lines.append("These alternatives would fit:")
        lines += [f"  {a['change']} (costs: {a.get('costs') or 'nothing'})" for a in fitting[:5]]
    return "\n".join(lines)
