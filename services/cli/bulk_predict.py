"""Labels a file of texts, pairs or chats through a running API: in windows sorted by length, resumable.

Every line of the input gives one line of the output, in the same order, so the number of complete lines
in the output is the position at which to resume. A window is written once all of it has been labelled.
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
from typing import Any, TypeAlias, TypedDict

import httpx

from services.cli.responses import HeadPrediction, PredictResponse, TextPrediction

# Lines that are sorted and written together: enough to group texts of similar length, few enough that
# an interrupted run repeats only seconds of work.
WINDOW_LINES = 512
# The limits of one request: well within those of the API, and a few batches for its engine.
REQUEST_TEXTS = 64
REQUEST_CHARACTERS = 60_000
# Concurrent requests, so that the engine never waits for the network.
CONCURRENT_REQUESTS = 4


# A text, or the object of a pair or of a chat as `/predict` takes it.
Input: TypeAlias = str | dict[str, Any]


class LabellingFailed(Exception):
    """The file cannot be labelled completely; the message says what to do."""


class OutputLine(TypedDict, total=False):
    """A line of the output: its number, and labels or an error."""

    line: int
    heads: dict[str, HeadPrediction]
    tokens: int
    version: str
    truncated: bool
    error: str


@dataclass(frozen=True)
class LabellingResult:
    """The result of a run."""

    lines: int  # in the output
    resumed_at: int  # number of lines written by earlier runs
    refused: int  # lines of this run that hold an error instead of labels


def label_file(
    source: Path,
    target: Path,
    *,
    client: httpx.Client,
    alias: str = "default",
    truncate: bool = False,
    on_progress: Callable[[int], None] = lambda _: None,
) -> LabellingResult:
    """Write one JSON line to `target` for each line of `source`, resuming an earlier run.

    `on_progress` receives the number of lines done. Raises LabellingFailed, OSError.
    """
    done, version = _resume(target)
    on_progress(done)
    lines = itertools.islice(_read_texts(source), done, None)
    written = done
    refused = 0
    with target.open("ab") as out, ThreadPoolExecutor(CONCURRENT_REQUESTS) as pool:
        while window := list(itertools.islice(lines, WINDOW_LINES)):
            predictor = _Predictor(client, alias=alias, truncate=truncate)
            answers = _label_window(window, first_line=written + 1, predictor=predictor, pool=pool)
            if len(answers) > 1 and all("error" in answer for answer in answers):
                # The request itself is at fault: an unknown alias, or a body that the API rejects.
                raise LabellingFailed(f"Every text was rejected: {answers[0]['error']}")
            for answer in answers:
                version = _check_version(answer, version, target)
                refused += "error" in answer
            out.write(b"".join(json.dumps(a, ensure_ascii=False).encode() + b"\n" for a in answers))
            out.flush()
            os.fsync(out.fileno())
            written += len(window)
            on_progress(written)
    return LabellingResult(lines=written, resumed_at=done, refused=refused)


def count_lines(path: Path) -> int:
    """Return how many texts a file has. Raises OSError."""
    with path.open("rb") as file:
        return sum(1 for _ in file)


def _read_texts(path: Path) -> Iterator[Input]:
    """Yield the input of each line: the line itself, or what a JSON line of a `.jsonl` file holds."""
    as_json = path.suffix in {".jsonl", ".ndjson"}
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
                yield json_input(json.loads(line)) if as_json else line
            except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
                expected = "a JSON object with `text` or `messages`" if as_json else "UTF-8"
                raise LabellingFailed(f"{path}, line {number}: not {expected} ({error})") from error


def json_input(row: Any) -> Input:
    """Return the text, the pair or the chat that an object holds. Raises KeyError, TypeError."""
    if not isinstance(row, dict):
        raise TypeError("it is no object")
    if isinstance(row.get("messages"), list):
        return {"messages": row["messages"]}
    text, text_pair = row["text"], row.get("text_pair")
    if not isinstance(text, str):
        raise TypeError("`text` is not a string")
    return text if text_pair is None else {"text": text, "text_pair": text_pair}


def _size(text: Input) -> int:
    return len(text if isinstance(text, str) else json.dumps(text, ensure_ascii=False))


def _resume(target: Path) -> tuple[int, str | None]:
    """Return the number of complete lines and their model version; truncate an incomplete last line."""
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
                    "choose another file or remove this one"
                ) from error
            whole += 1
            end += len(line)
        file.truncate(end)
    return whole, version


def _check_version(answer: OutputLine, version: str | None, target: Path) -> str | None:
    now = answer.get("version", version)
    if version is not None and now != version:
        raise LabellingFailed(
            f"The lines in {target} were labelled by {version}, but {now} is serving now. "
            "Promote the previous model again, or remove the file to relabel everything."
        )
    return now


def _label_window(
    window: Sequence[Input], *, first_line: int, predictor: _Predictor, pool: ThreadPoolExecutor
) -> list[OutputLine]:
    by_length = sorted(range(len(window)), key=lambda index: _size(window[index]))
    groups = list(_groups(by_length, window))
    predictions = pool.map(lambda group: predictor.predict([window[i] for i in group]), groups)
    lines: list[OutputLine] = [{} for _ in window]
    for group, outputs in zip(groups, predictions, strict=True):
        for index, output in zip(group, outputs, strict=True):
            lines[index] = {"line": first_line + index, **output}
    return lines


def _groups(order: Sequence[int], texts: Sequence[Input]) -> Iterator[list[int]]:
    group: list[int] = []
    characters = 0
    for index in order:
        size = _size(texts[index])
        if group and (len(group) == REQUEST_TEXTS or characters + size > REQUEST_CHARACTERS):
            yield group
            group, characters = [], 0
        group.append(index)
        characters += size
    if group:
        yield group


class _Predictor:
    """Predicts a few texts per request, waits while the API is busy, and isolates rejected texts."""

    def __init__(self, client: httpx.Client, *, alias: str, truncate: bool) -> None:
        self._client = client
        self._alias = alias
        self._truncate = truncate

    def predict(self, texts: Sequence[Input]) -> list[OutputLine]:
        response = self._post(texts)
        if response.status_code == httpx.codes.OK:
            body: PredictResponse = response.json()
            return [_output_line(text, body["version"]) for text in body["data"]]
        if response.status_code not in (413, 422):
            raise LabellingFailed(_problem(response))
        if len(texts) == 1:
            return [{"error": _problem(response)}]
        # At least one text is rejected: bisect to find it.
        middle = len(texts) // 2
        return self.predict(texts[:middle]) + self.predict(texts[middle:])

    def _post(self, texts: Sequence[Input]) -> httpx.Response:
        while True:
            try:
                response = self._client.post(
                    "/predict",
                    params={"alias": self._alias},
                    json={"inputs": list(texts), "truncate": self._truncate, "detail": True},
                )
            except httpx.HTTPError as error:
                raise LabellingFailed(
                    f"{self._client.base_url} does not respond ({error}); "
                    "start it and run this command again to resume"
                ) from error
            if response.status_code != httpx.codes.TOO_MANY_REQUESTS:
                return response
            time.sleep(float(response.headers.get("retry-after", 1)))


def _output_line(prediction: TextPrediction, version: str) -> OutputLine:
    heads: dict[str, HeadPrediction] = {
        name: {"label": head["label"], "score": round(head["score"], 6)}
        for name, head in prediction["heads"].items()
    }
    line: OutputLine = {"heads": heads, "tokens": prediction["tokens"], "version": version}
    if prediction["truncated"]:
        line["truncated"] = True
    return line


def _problem(response: httpx.Response) -> str:
    """Return the message of a problem document."""
    try:
        problem = response.json()
        return str(problem.get("detail") or problem["title"])
    except (ValueError, KeyError, AttributeError):
        return f"{response.request.url} returned status {response.status_code}"
