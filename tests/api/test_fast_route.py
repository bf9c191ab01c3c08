"""The fast route checks what an ordinary route of FastAPI would."""

from __future__ import annotations

import time

import pytest
from fastapi import APIRouter, Depends, Request
from fastapi.testclient import TestClient
from starlette.responses import Response

from services.api.fast_route import MAX_FIELDS, PREDICT_SCOPE, FastRoute
from tests.api.fakes import FakeStudent
from tests.api.harness import Platform

ROUTES = [("/predict", "inputs"), ("/v1/classify", "input")]


@pytest.fixture
def client(offline: Platform, one_head: FakeStudent) -> TestClient:
    offline.predictor.students["default"] = one_head
    return offline.client()


@pytest.mark.parametrize(("path", "field"), ROUTES)
def test_a_huge_list_produces_a_single_error(client: TestClient, path: str, field: str) -> None:
    started = time.process_time()
    response = client.post(path, json={field: [1] * 300_000})
    assert (response.status_code, response.json()["type"]) == (
        413,
        "urn:stillhouse:problem:too-large",
    )
    assert time.process_time() - started < 1.0  # an error per item takes several seconds


@pytest.mark.parametrize(("path", "field"), ROUTES)
def test_too_many_fields_produce_a_single_error(client: TestClient, path: str, field: str) -> None:
    body = {field: "a", **{f"f{number}": 1 for number in range(MAX_FIELDS)}}
    response = client.post(path, json=body)
    assert response.status_code == 422
    assert len(response.json()["errors"]) == 1


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 422),
        (b"null", 422),
        (b"[]", 422),
        (b'{"inputs": ', 400),
        (b'{"inputs": "\xff"}', 400),
        (b"[" * 5000, 400),
        (b'{"inputs": "a", "top_k": ' + b"1" * 5000 + b"}", 400),
        (b'{"inputs": "a", "threshold": NaN}', 422),
        (b'{"inputs": "a", "top_k": NaN}', 422),
        (b'{"inputs": "\\ud800"}', 422),
        (b'{"inputs": ["a", "b\\u0000"]}', 422),
    ],
)
def test_an_invalid_body_is_a_problem(client: TestClient, content: bytes, status: int) -> None:
    headers = {"content-type": "application/json"}
    response = client.post("/predict", content=content, headers=headers)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("media_type", ["text/plain", "application/xml", "multipart/json", ""])
def test_only_json_media_types_are_accepted(client: TestClient, media_type: str) -> None:
    headers = {"content-type": media_type}
    response = client.post("/predict", content=b'{"inputs": "a"}', headers=headers)
    assert response.status_code == 422


@pytest.mark.parametrize(
    "media_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"]
)
def test_every_spelling_of_the_json_media_type_is_accepted(
    client: TestClient, media_type: str
) -> None:
    headers = {"content-type": media_type}
    response = client.post("/predict", content=b'{"inputs": "a"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize("alias", ["", "Default", "1", "a b", "a" * 65, "é"])
def test_an_invalid_alias_is_rejected_by_field(client: TestClient, alias: str) -> None:
    response = client.post("/predict", params={"alias": alias}, json={"inputs": "a"})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "query.alias"


def test_other_methods_are_not_allowed(client: TestClient) -> None:
    response = client.get("/predict")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


def test_requests_are_counted_by_their_route(client: TestClient) -> None:
    client.post("/predict", json={"inputs": "a"})
    metrics = client.get("/metrics").text
    counted = 'stillhouse_http_requests_total{method="POST",route="/predict",status="200"} 1.0'
    assert counted in metrics


def test_a_fast_route_with_another_dependency_cannot_be_created() -> None:
    async def endpoint(request: Request) -> Response:
        return Response()

    async def ignored() -> None:
        """A dependency that only FastAPI's own injection would run."""

    router = APIRouter(route_class=FastRoute, dependencies=[PREDICT_SCOPE, Depends(ignored)])
    with pytest.raises(AssertionError, match="no other dependency"):
        router.post("/x")(endpoint)
