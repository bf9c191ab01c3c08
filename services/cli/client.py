"""The API as the commands see it: JSON in, JSON out, and every refusal a sentence."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

TIMEOUT_SECONDS = 120.0  # an upload is validated row by row before it is answered
_STREAM_SECONDS = 60.0  # an event stream that says nothing sends a comment every 15 s

Url = Annotated[str, typer.Option("--url", envvar="STILLHOUSE_URL", help="Where the API listens.")]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="STILLHOUSE_API_KEY", help="If it asks for one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Answer in JSON, for machines.")]
DEFAULT_URL = "http://127.0.0.1:8000"


class Refused(Exception):
    """What was asked was not done; the message is for a person, `problem` for a program."""

    def __init__(
        self, message: str, *, status: int | None = None, problem: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status  # of HTTP; None where nobody answered
        self.problem = dict(problem or {})


@dataclass(frozen=True)
class ServerEvent:
    """One event of a stream; `id` is empty for those that are not replayed."""

    type: str
    data: dict[str, Any]
    id: str


class Client:
    """A connection to the API, for a `with` block. Every method raises Refused."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._url = url
        self._http = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_SECONDS)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self._http.close()

    def get(self, path: str, *, params: Mapping[str, Any] | None = None) -> Any:
        """Return what `path` shows; parameters that are None are left out."""
        return self._ask("GET", path, params=params)

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
        """Send a JSON body or a form and return the answer."""
        return self._ask(
            "POST", path, params=params, json=json, data=data, files=files, headers=headers
        )

    def events(self, path: str) -> Iterator[ServerEvent]:
        """Yield the events of a stream until the server ends it, over reconnections.

        Each reconnection names the last event seen, so none is missed or told twice.
        """
        last_id = ""
        failures = 0
        while True:
            try:
                for event in self._stream(path, last_id):
                    last_id = event.id or last_id
                    failures = 0
                    yield event
                return
            except httpx.HTTPError as error:
                failures += 1
                if failures > 5:
                    raise self._silent(error) from error

    def _stream(self, path: str, last_id: str) -> Iterator[ServerEvent]:
        headers = {"Accept": "text/event-stream"}
        if last_id:
            headers["Last-Event-ID"] = last_id
        with self._http.stream("GET", path, headers=headers, timeout=_STREAM_SECONDS) as response:
            if not response.is_success:
                response.read()
                raise _refusal(response)
            fields: dict[str, str] = {}
            for line in response.iter_lines():
                if line:
                    name, _, value = line.partition(":")
                    fields[name] = value.removeprefix(" ")
                elif "data" in fields:
                    yield ServerEvent(
                        type=fields.get("event", "message"),
                        data=json.loads(fields["data"]),
                        id=fields.get("id", ""),
                    )
                    fields = {}

    def _ask(
        self, method: str, path: str, *, params: Mapping[str, Any] | None = None, **content: Any
    ) -> Any:
        given = {name: value for name, value in (params or {}).items() if value is not None}
        try:
            response = self._http.request(method, path, params=given, **content)
        except httpx.HTTPError as error:
            raise self._silent(error) from error
        if not response.is_success:
            raise _refusal(response)
        return response.json()

    def _silent(self, error: httpx.HTTPError) -> Refused:
        return Refused(
            f"{self._url} does not answer ({error or type(error).__name__}). Start a platform with "
            "`stillhouse up`, or name another with --url."
        )


@contextmanager
def connected(url: str, api_key: str | None, *, as_json: bool = False) -> Iterator[Client]:
    """Yield a client; a refusal ends the command with its sentence and exit code 1."""
    try:
        with Client(url, api_key=api_key) as client:
            yield client
    except Refused as error:
        if as_json and error.problem:
            print_json(error.problem)
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def print_json(value: Any) -> None:
    """Write one JSON document to standard output, for machines."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, indent=2) + "\n")


def _refusal(response: httpx.Response) -> Refused:
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        return Refused(
            f"{response.url} answered {response.status_code}: {response.text[:200]}",
            status=response.status_code,
        )
    return Refused(_sentence(problem), status=response.status_code, problem=problem)


def _sentence(problem: Mapping[str, Any]) -> str:
    """Return a problem document as sentences: what, where, and what would help."""
    lines = [str(problem.get("detail") or problem.get("title") or "The request was refused.")]
    for error in problem.get("errors") or []:
        lines.append(f"  {error.get('field')}: {error.get('message')}")
    for fault in problem.get("faults") or []:
        where = "" if fault.get("line") is None else f"line {fault['line']}: "
        lines.append(f"  {where}{fault.get('message')}")
    plan = problem.get("plan") or {}
    fitting = [a for a in plan.get("alternatives") or [] if a.get("verdict") != "does_not_fit"]
    if fitting:
        lines.append("These would fit:")
        lines += [f"  {a['change']} (costs: {a.get('costs') or 'nothing'})" for a in fitting[:5]]
    return "\n".join(lines)
