"""`stillhouse predict` against a small server that imitates the API."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.main import app

runner = CliRunner()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        head = {"label": "good", "score": 0.75, "scores": []}
        data = [
            {"index": i, "heads": {"tone": head}, "tokens": 3, "truncated": False}
            for i, _ in enumerate(body["inputs"])
        ]
        known = self.path == "/predict?alias=default"
        answer = (
            {"model": "m", "version": "mdl_1", "data": data}
            if known
            else {"title": "No student", "detail": "No student serves the alias."}
        )
        content = json.dumps(answer).encode()
        self.send_response(200 if known else 503)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_predictions_are_shown_in_a_table(url: str) -> None:
    done = runner.invoke(app, ["predict", "nice room", "--url", url])
    assert done.exit_code == 0, done.output
    assert "nice room" in done.output
    assert "good 0.750" in done.output


def test_json_output_is_the_response_of_the_api(url: str) -> None:
    done = runner.invoke(app, ["predict", "a", "b", "--url", url, "--json"])
    assert json.loads(done.stdout)["version"] == "mdl_1"


def test_a_file_is_labelled_line_by_line(url: str, tmp_path: Path) -> None:
    source, out = tmp_path / "texts.txt", tmp_path / "labels.jsonl"
    source.write_text("one\ntwo\n")
    done = runner.invoke(
        app, ["predict", "--file", str(source), "--out", str(out), "--url", url, "--json"]
    )
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert (summary["lines"], summary["resumed_at"], summary["refused"]) == (2, 0, 0)
    assert [
        json.loads(line)["heads"]["tone"]["label"] for line in out.read_text().splitlines()
    ] == ["good"] * 2


@pytest.mark.parametrize(
    "arguments", [[], ["text", "--file", "x", "--out", "y"], ["--file", "x"], ["a", "--out", "y"]]
)
def test_texts_and_files_cannot_be_combined(arguments: list[str]) -> None:
    assert runner.invoke(app, ["predict", *arguments]).exit_code == 2


def test_a_failure_is_reported_in_one_sentence(url: str) -> None:
    done = runner.invoke(app, ["predict", "a", "--alias", "other", "--url", url])
    assert done.exit_code == 1
    assert "No student serves the alias." in done.output


def test_a_missing_file_is_reported_in_one_sentence(url: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "none.txt")
    done = runner.invoke(app, ["predict", "--file", missing, "--out", "o.jsonl", "--url", url])
    assert done.exit_code == 1
    assert "none.txt" in done.output
    assert "Traceback" not in done.output
