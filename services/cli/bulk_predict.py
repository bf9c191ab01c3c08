"""Labels a file of texts through a running API: in windows, sorted by length, resumable.

Every line of the input gives one line of the output, in the same order, so the number of whole lines
in the output says where to go on. A window is written when all of it is answered.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

# Lines that are sorted and written together: enough to find texts of like length, few enough that
# an interrupted run repeats only seconds of work.
WINDOW_LINES = 512
# One request: well within the API's limits on texts and body, and a few batches for its engine.
REQUEST_TEXTS = 64
REQUEST_CHARACTERS = 60_000
# Requests under way at once, so that the engine never waits for the network.
REQUESTS_AHEAD = 4


class LabellingFailed(Exception):
    """The file cannot be labelled, or not any further; the message says what to do."""


@dataclass(frozen=True)
class Labelled:
    """What a run did."""

    lines: int  # in the output now
    resumed_at: int  # lines that an earlier run had written
    refused: int  # lines of this run that hold an error instead of labels


def label_file(
    source: Path,
    target: Path,
    *,
    client: httpx.Client,
    alias: str = "default",
    truncate: bool = False,
    on_lines: Callable[[int], None] = lambda _: None,
) -> Labelled:
    """Write one JSON line to `target` for each line of `source`; go on where an earlier run stopped.

    `on_lines` hears how many lines are done. Raises LabellingFailed, OSError.
    """
    done, version = _resume(target)
    on_lines(done)
    lines = itertools.islice(_read_texts(source), done, None)
    written = done
    refused = 0
    with target.open("ab") as out, ThreadPoolExecutor(REQUESTS_AHEAD) as pool:
        while window := list(itertools.islice(lines, WINDOW_LINES)):
            asker = _Asker(client, alias=alias, truncate=truncate)
            answers = _label_window(window, first_line=written + 1, asker=asker, pool=pool)
            if len(answers) > 1 and all("error" in answer for answer in answers):
                # Not the texts but the request: an alias or a body that the API does not take.
                raise LabellingFailed(f"Every text was refused: {answers[0]['error']}")
            for answer in answers:
                version = _same_version(answer, version, target)
                refused += "error" in answer
            out.write(b"".join(json.dumps(a, ensure_ascii=False).encode() + b"\n" for a in answers))
            out.flush()
            os.fsync(out.fileno())
            written += len(window)
            on_lines(written)
    return Labelled(lines=written, resumed_at=done, refused=refused)


def count_lines(path: Path) -> int:
    """Return how many texts a file has. Raises OSError."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _read_texts(path: Path) -> Iterator[str]:
    """Yield the text of each line: the line itself, or `text` of a JSON line in a `.jsonl` file."""
    as_json = path.suffix in {".jsonl", ".ndjson"}
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                text = json.loads(line)["text"] if as_json else line
                if not isinstance(text, str):
                    raise TypeError("`text` is no string")
                yield text
            except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
                wanted = "a JSON object with `text`" if as_json else "UTF-8"
                raise LabellingFailed(f"{path}, line {number}: not {wanted} ({error})") from error


def _resume(target: Path) -> tuple[int, str | None]:
    """Return the whole lines of an earlier run and the version that answered; cut a broken last line."""
    if not target.exists():
        return 0, None
    whole, end, version = 0, 0, None
    with target.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            try:
                version = json.loads(line).get("version", version)
            except (json.JSONDecodeError, AttributeError) as error:
                raise LabellingFailed(
                    f"{target}, line {whole + 1} was not written by this command; "
                    "name another file or remove this one"
                ) from error
            whole += 1
            end += len(line)
        file.truncate(end)
    return whole, version


def _same_version(answer: dict[str, Any], version: str | None, target: Path) -> str | None:
    now = answer.get("version", version)
    if version is not None and now != version:
        raise LabellingFailed(
            f"The lines of {target} so far are labelled by {version}, but {now} serves now. "
            "Promote the former again, or remove the file to label everything anew."
        )
    return now


def _label_window(
    window: Sequence[str], *, first_line: int, asker: _Asker, pool: ThreadPoolExecutor
) -> list[dict[str, Any]]:
    by_length = sorted(range(len(window)), key=lambda index: len(window[index]))
    groups = list(_groups(by_length, window))
    answers: list[dict[str, Any]] = [{}] * len(window)
    for group, found in zip(
        groups, pool.map(lambda group: asker.ask([window[i] for i in group]), groups), strict=True
    ):
        for index, answer in zip(group, found, strict=True):
            answers[index] = {"line": first_line + index, **answer}
    return answers


def _groups(order: Sequence[int], texts: Sequence[str]) -> Iterator[list[int]]:
    group: list[int] = []
    characters = 0
    for index in order:
        size = len(texts[index])
        if group and (len(group) == REQUEST_TEXTS or characters + size > REQUEST_CHARACTERS):
            yield group
            group, characters = [], 0
        group.append(index)
        characters += size
    if group:
        yield group


class _Asker:
    """Asks for a few texts, waits where the API is busy, and finds the text that it refuses."""

    def __init__(self, client: httpx.Client, *, alias: str, truncate: bool) -> None:
        self._client = client
        self._alias = alias
        self._truncate = truncate

    def ask(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        response = self._post(texts)
        if response.status_code == httpx.codes.OK:
            body = response.json()
            return [_answer(text, body["version"]) for text in body["data"]]
        if response.status_code not in (413, 422):
            raise LabellingFailed(_problem(response))
        if len(texts) == 1:
            return [{"error": _problem(response)}]
        # One of them is refused; halves find it in few requests.
        middle = len(texts) // 2
        return self.ask(texts[:middle]) + self.ask(texts[middle:])

    def _post(self, texts: Sequence[str]) -> httpx.Response:
        while True:
            try:
                response = self._client.post(
                    "/predict",
                    params={"alias": self._alias},
                    json={"inputs": list(texts), "truncate": self._truncate, "detail": True},
                )
            except httpx.HTTPError as error:
                raise LabellingFailed(
                    f"{self._client.base_url} does not answer ({error}); "
                    "start it and run this command again: it goes on where it stopped"
                ) from error
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                return response
            time.sleep(float(response.headers.get("retry-after", 1)))


def _answer(text: dict[str, Any], version: str) -> dict[str, Any]:
    heads = {
        name: {"label": head["label"], "score": round(head["score"], 6)}
        for name, head in text["heads"].items()
    }
    answer = {"heads": heads, "tokens": text["tokens"], "version": version}
    return {**answer, "truncated": True} if text["truncated"] else answer


def _problem(response: httpx.Response) -> str:
    """Return what a problem document says, in one sentence."""
    try:
        problem = response.json()
        return str(problem.get("detail") or problem["title"])
    except (ValueError, KeyError, AttributeError):
        return f"{response.request.url} answered {response.status_code}"
