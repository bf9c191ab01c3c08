"""The guarantees of SECURITY.md that concern the API."""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from fastapi.testclient import TestClient
from starlette.types import Message

from services.api.app import create_app
from services.api.auth.authentication import PUBLIC_PATHS
from services.api.auth.keys import Keys, KeysFile, Scope
from services.api.logs import configure_logs
from services.api.main import create
from services.api.serving.errors import EngineFailed
from services.api.settings import ApiSettings
from tests.api.fakes import FakeStudent
from tests.api.harness import Platform

KEY = "hush-the-key-5d2f"
WRONG = "hush-wrong-key-77aa"
TEXT = "hush a text of somebody 91c4"


@pytest.fixture
def locked(offline: Platform) -> Platform:
    entry = {"sha256": hashlib.sha256(KEY.encode()).hexdigest(), "scopes": ["admin"]}
    offline.keys = Keys(KeysFile.validate_python({"owner": entry}))
    return offline


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def operations(client: TestClient) -> list[tuple[str, str]]:
    return [
        (method.upper(), path)
        for path, found in client.get("/openapi.json").json()["paths"].items()
        for method in found
    ]


def test_every_operation_except_probes_requires_a_key(locked: Platform) -> None:
    client = locked.client()
    opened = set()
    for method, path in operations(client):
        response = client.request(method, path.replace("{", "").replace("}", ""))
        if response.status_code != 401:
            opened.add(path)
    assert opened == {"/livez", "/readyz", "/health"}
    assert opened < PUBLIC_PATHS


def test_without_a_key_unknown_paths_answer_401(locked: Platform) -> None:
    client = locked.client()
    for method, path in [("GET", "/nothing"), ("PUT", "/jobs"), ("GET", "/jobs/")]:
        assert client.request(method, path).status_code == 401


@pytest.mark.parametrize(
    "path", ["/jobs", "/jobs/plan", "/diagnoses", "/datasets", "/predict", "/v1/classify", "/none"]
)
@pytest.mark.anyio
async def test_an_unauthenticated_body_is_never_read(locked: Platform, path: str) -> None:
    app = create_app(locked.context())
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"1000")],
        "client": ("10.0.0.1", 1),
        "app": app,
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 401


def test_a_key_is_compared_with_every_entry_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["first", "second", "third"]
    hashes = [hashlib.sha256(name.encode()).hexdigest() for name in names]
    entries = {n: {"sha256": h, "scopes": []} for n, h in zip(names, hashes, strict=True)}
    keys = Keys(KeysFile.validate_python(entries))
    compared: list[str] = []

    def compare(one: str, other: str) -> bool:
        compared.append(one)
        return one == other

    monkeypatch.setattr(hmac, "compare_digest", compare)
    for asked in [*names, "none of them"]:
        compared.clear()
        found = keys.find(asked)
        assert (found is not None) is (asked in names)
        assert compared == hashes


def test_a_server_without_keys_logs_a_warning_at_startup(
    database_url: str, broker_url: str, data_dir: Path
) -> None:
    settings = ApiSettings(database_url=database_url, broker_url=broker_url, data_dir=data_dir)
    with structlog.testing.capture_logs() as lines, TestClient(create(settings)):
        pass
    assert any(line["event"] == "api_keys_off" for line in lines)


@pytest.mark.parametrize("path", ["/openapi.json", "/docs", "/redoc", "/livez"])
@pytest.mark.parametrize("method", ["OPTIONS", "POST", "DELETE"])
def test_a_wrong_method_on_a_public_path_is_405(locked: Platform, path: str, method: str) -> None:
    response = locked.client().request(method, path)
    assert response.status_code == 405
    assert "GET" in response.headers["allow"]


SAFE_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}


def test_every_response_has_security_headers(
    locked: Platform, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locked.predictor, "active", lambda alias: 1 / 0)
    client = locked.client()
    json_type = {"content-type": "application/json"}
    found = {
        200: client.get("/livez"),
        401: client.get("/jobs"),
        404: client.get("/nothing", headers=bearer(KEY)),
        405: client.put("/jobs", headers=bearer(KEY)),
        413: client.post("/jobs", content=b" " * 2**21, headers=bearer(KEY) | json_type),
        422: client.post("/jobs", json={}, headers=bearer(KEY)),
        500: client.post("/predict", json={"inputs": "a"}, headers=bearer(KEY)),
        503: client.get("/jobs", headers=bearer(KEY)),
    }
    for status, response in found.items():
        assert response.status_code == status
        assert {n: response.headers.get(n) for n in SAFE_HEADERS} == SAFE_HEADERS
        assert "server" not in response.headers


def test_no_response_allows_another_origin(locked: Platform) -> None:
    headers = {**bearer(KEY), "Origin": "https://example.org"}
    client = locked.client()
    for response in (
        client.get("/livez", headers=headers),
        client.options("/jobs", headers={**headers, "Access-Control-Request-Method": "POST"}),
    ):
        assert not any(name.startswith("access-control") for name in response.headers)


@pytest.fixture
def logged(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Log as the server does, at DEBUG, and restore the configuration afterwards."""
    caplog.set_level(logging.WARNING, "httpx2")  # the client's own lines are not the server's
    root = logging.getLogger()
    before, level, configuration = root.handlers[:], root.level, structlog.get_config()
    configure_logs()
    structlog.configure(cache_logger_on_first_use=False)
    root.setLevel(logging.DEBUG)
    yield
    root.handlers[:] = before
    root.setLevel(level)
    structlog.configure(**configuration)


def test_no_key_password_or_text_is_logged_or_returned(
    locked: Platform,
    logged: None,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    one_head: FakeStudent,
) -> None:
    password = "hush-password-3e1b"
    url = f"postgresql+psycopg://owner:{password}@127.0.0.1:1/nothing?connect_timeout=1"
    locked.settings = ApiSettings(**{**locked.settings.model_dump(), "database_url": url})
    locked.store = type(locked.store)(locked.store.engine, locked.settings)
    locked.predictor.students["default"] = one_head
    client = locked.client()
    answers = []

    def ask(method: str, path: str, key: str = KEY, **body: Any) -> None:
        answers.append(client.request(method, path, headers=bearer(key), **body))

    for key in (KEY, WRONG):
        ask("GET", "/jobs", key)
        ask("GET", f"/jobs?cursor={key}", key)
        ask("POST", "/predict", key, json={"inputs": [TEXT], "top_k": 0})
        ask("POST", "/predict", key, content=json.dumps({"inputs": TEXT})[:-1].encode())
        ask("POST", "/datasets", key, files={"file": ("a.jsonl", f'{{"text": "{TEXT}"'.encode())})
        ask("POST", "/diagnoses", key, json={"log": TEXT, "unknown": 1})
    locked.predictor.failure = EngineFailed("the engine broke")
    ask("POST", "/predict", json={"inputs": TEXT})
    locked.predictor.failure = None
    monkeypatch.setattr(locked.predictor, "predict", crash)
    ask("POST", "/predict", json={"inputs": TEXT})
    ask("GET", "/health")
    statuses = {answer.status_code for answer in answers}
    assert {200, 401, 422, 500, 503} <= statuses
    captured = capfd.readouterr()
    logs = captured.out + captured.err
    assert "request_failed" in logs  # the failure is logged
    assert "ZeroDivisionError" in logs
    returned = "".join(f"{answer.headers}{answer.text}" for answer in answers)
    for secret in (KEY, WRONG, TEXT, password):
        assert secret not in logs
        assert secret not in returned
    assert hashlib.sha256(KEY.encode()).hexdigest() not in logs + returned


async def crash(texts: list[str], **_: Any) -> None:
    """Fail with the text in a local variable, which a richer traceback would show."""
    first = texts[0]
    raise ZeroDivisionError(len(first))


def test_an_unreachable_database_is_reported_without_its_password(
    tmp_path: Path, logged: None, capfd: pytest.CaptureFixture[str]
) -> None:
    password = "hush-password-3e1b"
    settings = ApiSettings(
        database_url=f"postgresql://owner:{password}@127.0.0.1:1/nothing?connect_timeout=1",
        broker_url=f"redis://:{password}@127.0.0.1:1/0",
        data_dir=tmp_path,
    )
    with TestClient(create(settings), base_url="http://127.0.0.1") as client:
        answers = [client.get(path) for path in ("/readyz", "/jobs", "/health", "/metrics")]
    assert [answer.status_code for answer in answers] == [503, 503, 200, 200]
    captured = capfd.readouterr()
    assert "unavailable" in captured.err
    assert password not in captured.out + captured.err
    assert not any(password in answer.text for answer in answers)


def test_the_security_page_lists_every_scope() -> None:
    page = (Path(__file__).parents[2] / "SECURITY.md").read_text("utf-8")
    assert {str(scope) for scope in Scope} == set(re.findall(r"scope `([a-z]+)`", page))
