"""Callers over their rate get 429 with Retry-After; others are not affected."""

from __future__ import annotations

import hashlib

import pytest
from fastapi import Request
from fastapi.testclient import TestClient
from httpx2 import Response

from services.api.app import create_app
from services.api.auth.keys import Keys, KeysFile
from services.api.limits.rate_limit import (
    RateLimiter,
    RateLimiters,
    client_address,
    create_rate_limiters,
)
from services.api.settings import ApiSettings
from tests.api.harness import Platform


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_bucket_allows_its_burst_and_then_its_rate(clock: Clock) -> None:
    limiter = RateLimiter(per_second=2, burst=3, clock=clock)
    assert [limiter.try_acquire("a") for _ in range(4)] == [0, 0, 0, 0.5]
    clock.now += 0.5
    assert [limiter.try_acquire("a") for _ in range(2)] == [0, 0.5]
    clock.now += 60  # full again, and no fuller
    assert [limiter.try_acquire("a") for _ in range(4)] == [0, 0, 0, 0.5]


def test_rejected_requests_consume_no_token(clock: Clock) -> None:
    limiter = RateLimiter(per_second=1, burst=1, clock=clock)
    assert limiter.try_acquire("a") == 0
    assert {limiter.try_acquire("a") for _ in range(100)} == {1.0}
    clock.now += 1
    assert limiter.try_acquire("a") == 0


def test_every_caller_has_its_own_bucket(clock: Clock) -> None:
    limiter = RateLimiter(per_second=1, burst=1, clock=clock)
    assert (limiter.try_acquire("a"), limiter.try_acquire("b"), limiter.try_acquire("a")) == (
        0,
        0,
        1,
    )


def test_a_rate_of_zero_means_no_limit(clock: Clock) -> None:
    limiter = RateLimiter(per_second=0, burst=0, clock=clock)
    assert {limiter.try_acquire("a") for _ in range(1000)} == {0.0}


def test_the_number_of_buckets_is_bounded(clock: Clock) -> None:
    limiter = RateLimiter(per_second=1, burst=1, clock=clock, max_callers=10)
    for number in range(1000):
        limiter.try_acquire(str(number))
        assert limiter.num_callers <= 10
    assert limiter.try_acquire("999") > 0  # the last one is still known


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False),
        ("10.0.0.1", "::ffff:10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("2001:db8:1:2::3", "2001:db8:1:2:ffff::4", True),
        ("2001:db8:1:2::3", "2001:db8:1:3::3", False),
        ("testclient", "other", False),
    ],
)
def test_addresses_of_one_subscriber_count_as_one_caller(one: str, other: str, same: bool) -> None:
    def request(host: str) -> Request:
        return Request({"type": "http", "client": (host, 1)})

    assert (client_address(request(one)) == client_address(request(other))) is same


def test_requests_without_an_address_count_as_one_caller() -> None:
    assert client_address(Request({"type": "http"})) == ""


def test_limits_come_from_the_settings(offline: Platform) -> None:
    limits = {"predict_per_second": 7, "requests_per_second": 2, "rate_burst_seconds": 3}
    settings = ApiSettings(**{**offline.settings.model_dump(), **limits})
    limiters = create_rate_limiters(settings)
    for limiter, burst in ((limiters.predict, 21), (limiters.other, 6), (limiters.wrong_keys, 60)):
        assert [limiter.try_acquire("a") > 0 for _ in range(burst + 1)] == [False] * burst + [True]


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def client(offline: Platform, clock: Clock) -> TestClient:
    """Keys `first` and `second` that may do all; three requests at once, then one per second."""
    entries = {
        name: {"sha256": hashlib.sha256(name.encode()).hexdigest(), "scopes": scopes}
        for name, scopes in (("first", ["admin"]), ("second", ["admin"]), ("reader", []))
    }
    offline.keys = Keys(KeysFile.validate_python(entries))
    offline.rate_limiters = RateLimiters(
        predict=RateLimiter(per_second=1, burst=3, clock=clock),
        other=RateLimiter(per_second=0.1, burst=3, clock=clock),
        wrong_keys=RateLimiter(per_second=1, burst=3, clock=clock),
    )
    return TestClient(create_app(offline.context()), base_url="http://10.0.0.1")


def assert_limited(response: Response, *, seconds: int) -> None:
    assert response.status_code == 429
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["retry-after"] == str(seconds)
    assert response.json()["type"] == "urn:stillhouse:problem:rate-limited"


def predict(client: TestClient, key: str, path: str = "/predict") -> Response:
    return client.post(path, json={"inputs": "a", "input": "a"}, headers=bearer(key))


@pytest.mark.parametrize("path", ["/predict", "/v1/classify"])
def test_a_key_over_its_prediction_rate_gets_retry_after(
    client: TestClient, clock: Clock, path: str
) -> None:
    assert {predict(client, "first", path).status_code for _ in range(3)} == {422}
    assert_limited(predict(client, "first", path), seconds=1)
    clock.now += 1
    assert predict(client, "first", path).status_code == 422


def test_predictions_and_other_requests_have_separate_buckets(client: TestClient) -> None:
    for _ in range(3):
        assert client.get("/models/nothing", headers=bearer("first")).status_code == 404
    assert_limited(client.get("/models/nothing", headers=bearer("first")), seconds=10)
    assert predict(client, "first").status_code == 422


def test_each_key_has_its_own_bucket(client: TestClient) -> None:
    for _ in range(4):
        predict(client, "first")
    assert predict(client, "second").status_code == 422


def test_requests_without_the_scope_consume_tokens(client: TestClient) -> None:
    found = [predict(client, "reader").status_code for _ in range(4)]
    assert found == [403, 403, 403, 429]


def test_invalid_keys_are_rate_limited_by_address(client: TestClient, clock: Clock) -> None:
    found = [client.get("/jobs", headers=bearer("wrong")) for _ in range(3)]
    assert [response.status_code for response in found] == [401, 401, 401]
    assert_limited(client.get("/jobs"), seconds=1)  # no key is one of them
    assert client.get("/models/nothing", headers=bearer("first")).status_code == 404
    clock.now += 1
    assert client.get("/jobs").status_code == 401


def test_invalid_keys_of_one_address_do_not_limit_another(
    offline: Platform, client: TestClient
) -> None:
    for _ in range(4):
        client.get("/jobs")
    elsewhere = TestClient(client.app, base_url="http://10.0.0.1", client=("10.0.0.9", 1))
    assert elsewhere.get("/jobs").status_code == 401


@pytest.mark.parametrize("path", ["/readyz", "/health"])
def test_routes_without_a_key_are_rate_limited_by_address(client: TestClient, path: str) -> None:
    assert {client.get(path).status_code for _ in range(3)} == {200}
    assert_limited(client.get(path), seconds=10)
    assert client.get("/livez").status_code == 200


def test_without_keys_nothing_is_limited(offline: Platform, client: TestClient) -> None:
    offline.keys = Keys({})
    local = offline.client()
    assert {local.get("/models/nothing").status_code for _ in range(20)} == {404}
    assert {local.get("/readyz").status_code for _ in range(20)} == {200}
