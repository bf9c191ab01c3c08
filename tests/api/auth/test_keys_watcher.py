"""The keys file is read again without a restart."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from typer.testing import CliRunner

from services.api.auth.keys import Scope, load_keys
from services.api.auth.keys_watcher import KeysWatcher
from services.api.settings import ApiSettings
from services.cli.main import app
from services.shared.jobs.db.audit import AuditEntry
from tests.api.auth.key_entries import bearer, key_of
from tests.api.auth.test_keys import entry
from tests.api.harness import Platform
from tests.bench.load import free_port


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"one": entry(key_of("one"), "read")}))
    return path


@pytest.fixture
def watched(offline: Platform, file: Path) -> tuple[Platform, KeysWatcher, list[AuditEntry]]:
    settings = offline.settings.model_copy(update={"api_keys_file": file})
    offline.keys = load_keys(settings)
    recorded: list[AuditEntry] = []
    return offline, KeysWatcher(offline.keys, settings, record=recorded.append), recorded


def write(file: Path, content: Any) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    file.write_text(text)
    os.utime(file, ns=(time.time_ns(), time.time_ns()))


def status(platform: Platform, name: str) -> int:
    return platform.client().get("/jobs", headers=bearer(name)).status_code


Watched = tuple[Platform, KeysWatcher, list[AuditEntry]]


def test_a_key_is_added_and_another_revoked(watched: Watched, file: Path) -> None:
    platform, watcher, recorded = watched
    assert (status(platform, "one"), status(platform, "two")) == (503, 401)  # no database here
    write(file, {"two": entry(key_of("two"), "read")})
    watcher.check()
    assert (status(platform, "one"), status(platform, "two")) == (401, 503)
    [reload] = recorded
    assert (reload.key_name, reload.action, reload.outcome) == ("server", "reload_keys", "done")
    assert reload.detail == "added ['two'], removed ['one']"


@pytest.mark.parametrize("content", ["{", "[]", {}, {"one": {"sha256": "x"}}])
def test_an_invalid_file_keeps_the_former_keys_and_is_reported(
    watched: Watched, file: Path, content: Any
) -> None:
    platform, watcher, recorded = watched
    write(file, content)
    with structlog.testing.capture_logs() as logged:
        watcher.check()
    assert status(platform, "one") == 503
    assert logged[0]["event"] == "keys_not_reloaded"
    assert recorded[0].outcome == "refused"
    ready = platform.client().get("/readyz")
    assert ready.status_code == 200
    assert "former keys" in ready.json()["warnings"][0]
    write(file, {"two": entry(key_of("two"), "read")})
    watcher.check()
    assert platform.client().get("/readyz").json()["warnings"] == []


def test_a_file_that_is_gone_keeps_the_former_keys(watched: Watched, file: Path) -> None:
    platform, watcher, _ = watched
    file.unlink()
    watcher.check()
    assert status(platform, "one") == 503
    assert platform.client().get("/readyz").json()["warnings"]


def test_an_unchanged_file_is_not_read_again(watched: Watched) -> None:
    _, watcher, recorded = watched
    watcher.check()
    assert recorded == []
    watcher.check(force=True)
    assert len(recorded) == 1


def _stillhouse(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_keys_are_created_listed_and_revoked_by_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "new" / "keys.json"
    arguments = ["keys", "create", "ci", "--file", str(path), "--project", "reviews"]
    made = _stillhouse(*arguments, "--scope", "submit", "--scope", "predict", "--json")
    assert made.exit_code == 0, made.output
    key = json.loads(made.stdout)["key"]
    assert key not in path.read_text()
    keys = load_keys(
        ApiSettings(database_url="x", broker_url="x", data_dir=tmp_path, api_keys_file=path)
    )
    found = keys.find(key)
    assert found is not None
    assert (found[0], found[1].project) == ("ci", "reviews")
    assert found[1].scopes == frozenset({Scope.SUBMIT, Scope.PREDICT})
    assert _stillhouse(*arguments, "--scope", "read").exit_code == 1  # the name is taken
    monkeypatch.setenv("STILLHOUSE_API_KEYS_FILE", str(path))
    listed = json.loads(_stillhouse("keys", "list", "--json").stdout)
    assert listed == [{"name": "ci", "project": "reviews", "scopes": ["predict", "submit"]}]
    other = _stillhouse("keys", "create", "x", "--project", "No!", "--scope", "read")
    assert other.exit_code == 1
    assert "--project" in other.output
    assert _stillhouse("keys", "revoke", "ci").exit_code == 0
    assert json.loads(path.read_text()) == {}
    assert _stillhouse("keys", "revoke", "ci").exit_code == 1


def test_a_signal_makes_a_running_server_read_the_file(
    database_url: str, broker_url: str, tmp_path: Path, file: Path
) -> None:
    port = free_port()
    env = os.environ | {
        "STILLHOUSE_DATABASE_URL": database_url,
        "STILLHOUSE_BROKER_URL": broker_url,
        "STILLHOUSE_DATA_DIR": str(tmp_path / "data"),
        "STILLHOUSE_PORT": str(port),
        "STILLHOUSE_API_KEYS_FILE": str(file),
        "STILLHOUSE_API_KEYS_POLL_SECONDS": "3600",
    }
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "services.api.main"], env=env, stdout=output, stderr=output
        )
    try:
        _until(lambda: _answers(f"{url}/livez", {}) == 200)
        write(file, {"two": entry(key_of("two"), "read")})
        assert _answers(f"{url}/jobs", bearer("two")) == 401
        server.send_signal(signal.SIGHUP)
        _until(lambda: _answers(f"{url}/jobs", bearer("two")) == 200)
        assert _answers(f"{url}/jobs", bearer("one")) == 401
    finally:
        server.terminate()
        server.wait(30)


def _answers(url: str, headers: dict[str, str]) -> int | None:
    try:
        return httpx.get(url, headers=headers, timeout=10).status_code
    except httpx.HTTPError:
        return None


def _until(condition: Callable[[], bool], *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)
