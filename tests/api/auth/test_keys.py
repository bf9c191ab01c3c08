"""API keys: scopes, the keys file, and servers without keys."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from services.api.auth.keys import ApiKey, Keys, KeysFile, Scope, load_keys, read_keys
from services.api.settings import ApiSettings
from tests.api.harness import Platform


def entry(key: str, *scopes: str) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(key.encode()).hexdigest(), "scopes": list(scopes)}


@pytest.fixture
def client(offline: Platform) -> TestClient:
    names = [str(scope) for scope in Scope]
    file = {name: entry(f"{name}-key", name) for name in names}
    offline.keys = Keys(KeysFile.validate_python(file))
    return offline.client()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


PATHS = [
    ("POST", "/predict", Scope.PREDICT),
    ("POST", "/v1/classify", Scope.PREDICT),
    ("POST", "/jobs", Scope.SUBMIT),
    ("POST", "/jobs/job_1/cancel", Scope.SUBMIT),
    ("POST", "/jobs/job_1/retry", Scope.SUBMIT),
    ("POST", "/models/mdl_1/promote", Scope.PROMOTE),
]


@pytest.mark.parametrize(("method", "path", "scope"), PATHS)
def test_writing_requires_a_key(client: TestClient, method: str, path: str, scope: Scope) -> None:
    response = client.request(method, path, json={})
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert response.json()["type"].endswith(":unauthorized")


@pytest.mark.parametrize("key", ["", "wrong", "predict-keys", "页", "\x00"])
def test_an_invalid_key_is_rejected(client: TestClient, key: str) -> None:
    headers = {b"Authorization": b"Bearer " + key.encode()}
    assert client.get("/jobs", headers=headers).status_code == 401


@pytest.mark.parametrize(("method", "path", "scope"), PATHS)
def test_each_scope_permits_only_its_own_operations(
    client: TestClient, method: str, path: str, scope: Scope
) -> None:
    for held in Scope:
        response = client.request(method, path, json={}, headers=bearer(f"{held}-key"))
        if held in (scope, Scope.ADMIN):
            assert response.status_code not in (401, 403)
        else:
            assert response.status_code == 403
            assert str(scope) in response.json()["detail"]


@pytest.mark.parametrize("held", ["read", "submit", "promote", "admin"])
def test_who_submits_or_promotes_may_read_too(client: TestClient, held: str) -> None:
    response = client.get("/jobs", headers=bearer(f"{held}-key"))
    assert response.status_code == 503  # permitted, but there is no database here


@pytest.mark.parametrize("held", ["predict", "metrics"])
@pytest.mark.parametrize("path", ["/jobs", "/models/mdl_1", "/promotions", "/datasets"])
def test_a_key_for_predictions_or_metrics_reads_nothing(
    client: TestClient, held: str, path: str
) -> None:
    response = client.get(path, headers=bearer(f"{held}-key"))
    assert response.status_code == 403
    assert "read" in response.json()["detail"]


@pytest.mark.parametrize(
    ("scopes", "project", "may"),
    [
        (["read"], None, True),  # an entry from before there were projects
        (["submit"], None, True),
        (["predict"], None, False),
        (["read"], "default", False),
        (["metrics"], "reviews", True),
        (["admin"], "reviews", True),
    ],
)
def test_metrics_need_their_scope_or_a_key_from_before_there_were_projects(
    scopes: list[str], project: str | None, may: bool
) -> None:
    key = ApiKey.model_validate({**entry("k", *scopes), "project": project})
    assert key.allows(Scope.METRICS) is may


def test_a_key_without_a_project_belongs_to_default() -> None:
    assert ApiKey.model_validate(entry("k", "read")).owner == "default"


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/openapi.json"])
def test_probes_and_documents_need_no_key(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 200


def test_metrics_need_a_key_where_there_are_keys(client: TestClient) -> None:
    assert client.get("/metrics").status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "https://example.org"},
        {"Origin": "null"},
        {"Host": "rebound.example.org"},
        {"Host": "127.0.0.1.example.org:8000"},
        {"Host": "[::1"},
    ],
)
def test_without_keys_requests_from_foreign_pages_are_rejected(
    offline: Platform, headers: dict[str, str]
) -> None:
    for method, path in [("GET", "/jobs"), ("POST", "/datasets"), ("POST", "/jobs/job_1/cancel")]:
        response = offline.client().request(method, path, headers=headers)
        assert response.status_code == 403
        assert "localhost" in response.json()["detail"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:8000", "Origin": "http://localhost:3000"},
        {"Host": "[::1]:8000"},
        {"Host": "127.0.0.1"},
    ],
)
def test_without_keys_local_requests_are_accepted(
    offline: Platform, headers: dict[str, str]
) -> None:
    response = offline.client().get("/jobs", headers=headers)
    assert response.status_code == 503  # accepted, but there is no database here


def test_with_keys_any_host_name_is_accepted(client: TestClient) -> None:
    headers = {**bearer("admin-key"), "Host": "gpu-7.example.org"}
    assert client.get("/jobs", headers=headers).status_code == 503


def settings(tmp_path: Path, **more: Any) -> ApiSettings:
    return ApiSettings(database_url="x", broker_url="x", data_dir=tmp_path, **more)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_listening_on_loopback_needs_no_keys(tmp_path: Path, host: str) -> None:
    assert load_keys(settings(tmp_path, host=host)).is_empty


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.org", ""])
def test_listening_on_a_network_requires_keys(tmp_path: Path, host: str) -> None:
    with pytest.raises(ValueError, match="STILLHOUSE_API_KEYS_FILE"):
        load_keys(settings(tmp_path, host=host))


def test_an_empty_keys_file_counts_as_no_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text("{}")
    with pytest.raises(ValueError, match="STILLHOUSE_API_KEYS_FILE"):
        load_keys(settings(tmp_path, host="0.0.0.0", api_keys_file=file))


def test_a_keys_file_holds_hashes_and_scopes(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"ci": entry("secret", "submit", "predict")}))
    keys = load_keys(settings(tmp_path, host="0.0.0.0", api_keys_file=file))
    found = keys.find("secret")
    assert found is not None
    name, key = found
    assert (name, key.scopes) == ("ci", frozenset({Scope.SUBMIT, Scope.PREDICT}))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('{"ci": {"sha256": "short", "scopes": []}}', "ci.sha256"),
        ('{"ci": {"key": "plain"}}', "ci"),
        ("[]", "invalid at ''"),
        ("{", "invalid at ''"),
    ],
)
def test_an_invalid_keys_file_is_reported_without_its_values(
    tmp_path: Path, text: str, names: str
) -> None:
    file = tmp_path / "keys.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=names) as raised:
        read_keys(file)
    assert "plain" not in str(raised.value)


def test_a_missing_keys_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        read_keys(tmp_path / "none.json")
