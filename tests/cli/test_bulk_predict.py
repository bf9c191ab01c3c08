"""Labelling a file through the API: order, resuming, rejected texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.cli.bulk_predict import (
    WINDOW_LINES,
    LabellingFailed,
    LabellingResult,
    json_input,
    label_file,
)

BASE = "http://api.test"

Run = Callable[..., LabellingResult]


class Api:
    """Labels a text with its number of characters; rejects texts of more than a hundred."""

    def __init__(self) -> None:
        self.version = "v1"
        self.requests: list[list[str]] = []
        self.busy_responses = 0
        self.fail_after: int | None = None

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content)
        if self.fail_after is not None and len(self.requests) >= self.fail_after:
            raise httpx.ConnectError("refused")
        if self.busy_responses:
            self.busy_responses -= 1
            return httpx.Response(429, headers={"Retry-After": "0"})
        self.requests.append(body["inputs"])
        if any(len(text) > 100 for text in body["inputs"]) and not body["truncate"]:
            return httpx.Response(422, json={"title": "Too long", "detail": "A text is too long."})
        if "" in body["inputs"]:
            return httpx.Response(422, json={"title": "Empty", "detail": "A text is empty."})
        data = [
            {
                "index": index,
                "heads": {"size": {"label": str(len(text)), "score": 0.5, "scores": []}},
                "tokens": len(text),
                "truncated": len(text) > 100,
            }
            for index, text in enumerate(body["inputs"])
        ]
        return httpx.Response(200, json={"model": "m", "version": self.version, "data": data})


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def run(api: Api, tmp_path: Path) -> Run:
    def run(texts: list[str] | None = None, *, truncate: bool = False) -> LabellingResult:
        source = tmp_path / "texts.txt"
        if texts is not None:
            source.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
        with httpx.Client(transport=httpx.MockTransport(api), base_url=BASE) as client:
            return label_file(source, tmp_path / "labels.jsonl", client=client, truncate=truncate)

    return run


def labels(tmp_path: Path) -> list[dict[str, Any]]:
    lines = (tmp_path / "labels.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_every_line_is_labelled_in_order(run: Run, tmp_path: Path) -> None:
    texts = ["x" * (1 + 37 * n % 90) for n in range(WINDOW_LINES + 100)]
    result = run(texts)
    found = labels(tmp_path)
    assert [line["line"] for line in found] == list(range(1, len(texts) + 1))
    assert [line["heads"]["size"]["label"] for line in found] == [str(len(t)) for t in texts]
    assert (result.lines, result.refused) == (len(texts), 0)


def test_texts_of_similar_length_share_a_request(run: Run, api: Api) -> None:
    run(["x" * (1 + n % 2 * 80) for n in range(128)])
    assert all(len({len(text) for text in texts}) == 1 for texts in api.requests)


def test_an_interrupted_run_is_resumed(run: Run, api: Api, tmp_path: Path) -> None:
    texts = ["x" * (1 + n % 50) for n in range(WINDOW_LINES + 10)]
    api.fail_after = WINDOW_LINES // 64
    with pytest.raises(LabellingFailed, match="run this command again to resume"):
        run(texts)
    assert len(labels(tmp_path)) == WINDOW_LINES
    with (tmp_path / "labels.jsonl").open("a") as file:
        file.write('{"line": 51')  # what a crash leaves
    api.fail_after = None
    api.requests.clear()
    result = run()
    assert result.resumed_at == WINDOW_LINES
    assert sum(map(len, api.requests)) == 10
    assert [line["line"] for line in labels(tmp_path)] == list(range(1, WINDOW_LINES + 11))


def test_a_rejected_text_affects_only_its_own_line(run: Run, tmp_path: Path) -> None:
    result = run(["good", "x" * 101, "", "fine"])
    found = labels(tmp_path)
    assert found[1]["error"] == "A text is too long."
    assert found[2]["error"] == "A text is empty."
    assert found[0]["heads"]["size"]["label"] == "4"
    assert found[3]["heads"]["size"]["label"] == "4"
    assert result.refused == 2


def test_truncation_is_requested_and_marked(run: Run, tmp_path: Path) -> None:
    run(["x" * 101, "short"], truncate=True)
    assert [line.get("truncated", False) for line in labels(tmp_path)] == [True, False]


def test_a_request_is_retried_while_the_api_is_busy(run: Run, api: Api, tmp_path: Path) -> None:
    api.busy_responses = 2
    run(["one"])
    assert len(labels(tmp_path)) == 1


def test_one_file_never_mixes_two_model_versions(run: Run, api: Api, tmp_path: Path) -> None:
    run(["one"])
    api.version = "v2"
    with pytest.raises(LabellingFailed, match="were labelled by v1, but v2"):
        run(["one", "two"])
    assert len(labels(tmp_path)) == 1


def test_a_file_written_by_another_program_is_not_continued(run: Run, tmp_path: Path) -> None:
    (tmp_path / "labels.jsonl").write_text("my notes\n")
    with pytest.raises(LabellingFailed, match="line 1 was not written"):
        run(["one"])
    assert (tmp_path / "labels.jsonl").read_text() == "my notes\n"


def test_the_text_of_json_lines_is_labelled(api: Api, tmp_path: Path) -> None:
    source = tmp_path / "texts.jsonl"
    source.write_text('{"text": "four"}\n{"text": "sixsix"}\n')
    with httpx.Client(transport=httpx.MockTransport(api), base_url=BASE) as client:
        label_file(source, tmp_path / "labels.jsonl", client=client)
    assert [line["tokens"] for line in labels(tmp_path)] == [4, 6]
    source.write_text('{"text": "four"}\n{"txt": "sixsix"}\n')
    (tmp_path / "labels.jsonl").unlink()
    with (
        httpx.Client(transport=httpx.MockTransport(api), base_url=BASE) as client,
        pytest.raises(LabellingFailed, match=r"texts\.jsonl, line 2"),
    ):
        label_file(source, tmp_path / "labels.jsonl", client=client)


def test_a_window_of_rejected_texts_stops_the_run(run: Run, tmp_path: Path) -> None:
    with pytest.raises(LabellingFailed, match="Every text was rejected: A text is too long"):
        run(["x" * 101, "y" * 102])
    assert labels(tmp_path) == []


def test_json_lines_may_hold_pairs_and_chats() -> None:
    messages = [{"role": "user", "content": "hello"}]
    assert json_input({"text": "a", "id": 1}) == "a"
    assert json_input({"text": "a", "text_pair": "b"}) == {"text": "a", "text_pair": "b"}
    assert json_input({"messages": messages}) == {"messages": messages}
    with pytest.raises(TypeError, match="not a string"):
        json_input({"text": 3, "text_pair": "b"})
