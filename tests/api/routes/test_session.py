"""Signing in: the cookie, the CSRF token, and what scopes permit by either."""

from __future__ import annotations

import pytest
from fastapi.testclient import TestClient

from services.api.auth.keys import Scope
from services.api.auth.sessions import COOKIE
from services.api.limits.rate_limit import RateLimiter, RateLimiters
from tests.api.auth.key_entries import bearer, keys_of
from tests.api.fakes import FakeStudent
from tests.api.harness import JobDriver, Platform
from tests.factories import SENTIMENT

KEYS = keys_of(
    ci=("ours", [Scope.SUBMIT, Scope.PREDICT]),
    reader=("ours", [Scope.READ]),
)


@pytest.fixture
def client(platform: Platform) -> TestClient:
    platform.keys = KEYS
    return platform.client()


def sign_in(client: TestClient, name: str) -> dict[str, str]:
    """Return the headers that a signed-in page sends with a write."""
    response = client.post("/session", headers=bearer(name))
    assert response.status_code == 201, response.text
    return {"X-CSRF-Token": response.json()["csrf_token"]}


def test_a_key_becomes_a_cookie_that_scripts_and_other_sites_do_not_get(client: TestClient) -> None:
    response = client.post("/session", headers=bearer("ci"))
    cookie = response.headers["set-cookie"]
    assert cookie.startswith(f"{COOKIE}=")
    for attribute in ("HttpOnly", "SameSite=strict", "Path=/", "Max-Age=3600"):
        assert attribute in cookie
    assert "Secure" not in cookie  # over http it would not come back
    assert "key-of-ci" not in cookie
    assert {k: response.json()[k] for k in ("key", "project", "scopes")} == {
        "key": "ci",
        "project": "ours",
        "scopes": ["predict", "read", "submit"],
    }
    assert client.get("/session").json()["csrf_token"] == response.json()["csrf_token"]
    assert client.get("/jobs").status_code == 200


def test_behind_tls_the_cookie_is_secure(platform: Platform) -> None:
    platform.keys = KEYS
    client = platform.client()
    response = client.post("https://127.0.0.1:8000/session", headers=bearer("ci"))
    assert "Secure" in response.headers["set-cookie"]


def test_a_write_by_cookie_needs_the_csrf_token_and_this_origin(platform: Platform) -> None:
    platform.keys = KEYS
    driver = JobDriver(platform)
    client = driver.client
    platform.predictor.students["ours/default"] = FakeStudent("s", "v", [SENTIMENT])
    token = sign_in(client, "ci")
    writes = [
        ("/jobs/job_1/cancel", {}),
        ("/predict", {"inputs": "a"}),
        ("/diagnoses", {"log": "x"}),
    ]
    for path, body in writes:
        for headers in ({}, {"X-CSRF-Token": "0" * 64}, token | {"Origin": "http://evil.example"}):
            refused = client.post(path, json=body, headers=headers)
            assert refused.status_code == 403, (path, headers)
            assert "X-CSRF-Token" in refused.json()["detail"]
        own = token | {"Origin": "http://127.0.0.1:8000"}
        assert client.post(path, json=body, headers=own).status_code in (200, 404), path
    # A key that is sent as usual needs no token, with or without a cookie.
    assert client.post("/predict", json={"inputs": "a"}, headers=bearer("ci")).status_code == 200


def test_a_session_permits_what_its_key_permits(client: TestClient) -> None:
    token = sign_in(client, "reader")
    assert client.post("/jobs/job_1/cancel", headers=token).status_code == 403
    assert client.post("/predict", json={"inputs": "a"}, headers=token).status_code == 403
    assert client.get("/metrics").status_code == 403
    assert client.get("/jobs").status_code == 200


def test_signing_out_ends_the_session(client: TestClient) -> None:
    token = sign_in(client, "ci")
    cookie = client.cookies[COOKIE]
    assert client.delete("/session").status_code == 403  # a write like any other
    assert client.delete("/session", headers=token).status_code == 204
    assert client.get("/session").status_code == 401
    client.cookies.set(COOKIE, cookie)
    assert client.get("/jobs").status_code == 401


def test_wrong_keys_and_forged_cookies_count_as_wrong_keys(platform: Platform) -> None:
    platform.keys = KEYS
    platform.rate_limiters = RateLimiters(wrong_keys=RateLimiter(per_second=0.001, burst=2))
    client = platform.client()
    assert client.post("/session", headers=bearer("nobody")).status_code == 401
    client.cookies.set(COOKIE, "forged.0123456789abcdef.1.99999999999.00")
    assert client.get("/session").status_code == 401
    assert client.get("/jobs").status_code == 429


def test_a_server_without_keys_needs_no_session(platform: Platform) -> None:
    client = platform.client()
    session = client.get("/session").json()
    assert (session["key"], session["csrf_token"]) == (None, None)
    assert session["scopes"] == [str(scope) for scope in Scope]
    response = client.post("/session")
    assert "set-cookie" not in response.headers
    assert client.get("/session", headers={"Origin": "http://evil.example"}).status_code == 403


def test_sign_ins_are_in_the_audit_log_and_possible_during_maintenance(platform: Platform) -> None:
    platform.keys = keys_of(root=("default", [Scope.ADMIN]))
    client = platform.client()
    on = {"on": True, "reason": "a new disk"}
    assert client.post("/maintenance", json=on, headers=bearer("root")).status_code == 200
    token = sign_in(client, "root")
    actions = [item["action"] for item in client.get("/audit").json()["items"]]
    assert actions == ["create_session", "set_maintenance"]
    assert client.post("/maintenance", json={"on": False}, headers=token).status_code == 200
