"""The responses of /predict and /v1/classify, for one head and for several."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx2 import Response
from starlette.types import Message

from services.api.app import create_app
from services.api.serving.errors import EngineFailed, Overloaded, RequestTooLarge, UnusableText
from services.shared.datasets import text as texts
from tests.api.fakes import FakeStudent
from tests.api.harness import JobDriver, Platform

NEGATIVE_POSITIVE = [
    {"label": "positive", "score": pytest.approx(2 / 3)},
    {"label": "negative", "score": pytest.approx(1 / 3)},
]
DOMAINS = ["other", "hotel", "computer", "book"]


@pytest.fixture
def client(offline: Platform, one_head: FakeStudent, two_heads: FakeStudent) -> TestClient:
    offline.predictor.students.update({"default": one_head, "challenger": two_heads})
    return offline.client()


def ask(client: TestClient, *, several: bool = False, **body: Any) -> Response:
    alias = "?alias=challenger" if several else ""
    return client.post(f"/predict{alias}", json=body)


def test_one_text_and_one_head_give_labels_by_score(client: TestClient) -> None:
    assert ask(client, inputs="好").json() == NEGATIVE_POSITIVE


def test_a_list_gives_a_list_even_of_one(client: TestClient) -> None:
    assert ask(client, inputs=["好"]).json() == [NEGATIVE_POSITIVE]


def test_a_flat_list_is_a_batch_and_not_a_pair(client: TestClient) -> None:
    assert ask(client, inputs=["好", "坏"]).json() == [NEGATIVE_POSITIVE] * 2


def test_teis_nested_batch_is_accepted(client: TestClient, offline: Platform) -> None:
    assert ask(client, inputs=[["好"], ["坏"]]).json() == [NEGATIVE_POSITIVE] * 2
    assert offline.predictor.seen == [["好", "坏"]]


def test_pairs_and_chats_reach_the_model_in_every_form(
    client: TestClient, offline: Platform
) -> None:
    pair = {"text": "好", "text_pair": "坏"}
    chat = {"messages": [{"role": "user", "content": "好"}]}
    assert ask(client, inputs=pair).json() == NEGATIVE_POSITIVE
    assert ask(client, inputs=[pair, chat, "好"]).json() == [NEGATIVE_POSITIVE] * 3
    assert ask(client, inputs=[["好", "坏"]]).json() == [NEGATIVE_POSITIVE]
    both = [texts.Pair("好", "坏"), texts.Chat((texts.Message("user", "好"),))]
    assert offline.predictor.seen == [both[:1], [*both, "好"], both[:1]]
    response = client.post("/v1/classify", json={"input": [pair, chat]})
    assert response.status_code == 200
    assert offline.predictor.seen[-1] == both


@pytest.mark.parametrize(
    "item",
    [
        {"text": "a\x08", "text_pair": "b"},
        {"text": "a", "text_pair": "b\x08"},
        {"messages": [{"role": "user", "content": "\x08"}]},
    ],
)
def test_a_control_character_is_rejected_in_every_part(
    client: TestClient, item: dict[str, Any]
) -> None:
    response = ask(client, inputs=["a", item])
    assert response.status_code == 422
    assert response.json()["errors"] == [
        {"field": "inputs.1", "message": "Text 1 contains the control character U+0008."}
    ]


@pytest.mark.parametrize("item", [{"text": "a"}, {"messages": []}, ["a", "b", "c"], {"text": 1}])
def test_a_half_pair_and_an_empty_chat_are_rejected_by_field(client: TestClient, item: Any) -> None:
    response = ask(client, inputs=[item])
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"].startswith("inputs")


def test_several_heads_give_a_map_by_head(client: TestClient) -> None:
    answer = ask(client, several=True, inputs="好").json()
    assert answer["sentiment"] == NEGATIVE_POSITIVE
    assert [row["label"] for row in answer["domain"]] == DOMAINS
    assert ask(client, several=True, inputs=["好"]).json() == [answer]


def test_one_requested_head_of_several_gives_the_plain_shape(client: TestClient) -> None:
    answer = ask(client, several=True, inputs="好", heads=["sentiment"]).json()
    assert answer == NEGATIVE_POSITIVE


def test_an_unknown_head_is_named(client: TestClient) -> None:
    response = ask(client, inputs="好", heads=["sentiment", "mood"])
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "heads.1"


def test_raw_scores_are_logits(client: TestClient) -> None:
    answer = ask(client, inputs="好", raw_scores=True).json()
    assert [row["score"] for row in answer] == [1.0, 0.0]


def test_top_k_keeps_the_best(client: TestClient) -> None:
    answer = ask(client, several=True, inputs="好", top_k=1).json()
    assert {head: [row["label"] for row in rows] for head, rows in answer.items()} == {
        "sentiment": ["positive"],
        "domain": ["other"],
    }


def test_detail_includes_model_tokens_and_usage(client: TestClient) -> None:
    answer = ask(client, several=True, inputs=["a b", "c"], detail=True).json()
    assert (answer["model"], answer["version"]) == ("reviews", "mdl_2_1")
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    first = answer["data"][0]
    assert (first["index"], first["tokens"], first["truncated"]) == (0, 2, False)
    assert first["heads"]["domain"]["label"] == "other"
    assert len(first["heads"]["domain"]["scores"]) == 4


def test_a_long_text_is_rejected_by_index(client: TestClient) -> None:
    response = ask(client, inputs=["short", "w " * 9])
    assert response.status_code == 422
    body = response.json()
    assert body["type"].endswith(":text-too-long")
    assert body["errors"][0]["field"] == "inputs.1"


def test_a_long_text_is_truncated_on_request(client: TestClient) -> None:
    answer = ask(client, inputs="w " * 9, truncate=True, detail=True).json()
    assert answer["data"][0]["truncated"] is True


def test_headers_name_the_version_and_the_stages(client: TestClient) -> None:
    response = ask(client, inputs="好")
    assert response.headers["x-model-version"] == "mdl_1_1"
    assert (
        response.headers["server-timing"] == "tokenise;dur=1.00, queue;dur=2.00, compute;dur=3.00"
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": []},
        {"inputs": 1},
        {"inputs": [["a", "b", "c"]]},
        {"inputs": [[]]},
        {"inputs": {"text": "a"}},
        {"inputs": "a", "truncation_direction": "Left"},
        {"inputs": "a", "top_k": 0},
        {"inputs": "a", "unknown": True},
        {"inputs": "a", "heads": []},
        {"inputs": "a", "truncate": "perhaps"},
    ],
)
def test_an_invalid_request_is_rejected(client: TestClient, body: dict[str, Any]) -> None:
    response = client.post("/predict", json=body)
    assert response.status_code == 422
    assert response.json()["errors"]


def test_more_texts_than_one_request_may_have_are_too_large(
    client: TestClient, offline: Platform
) -> None:
    most = offline.settings.predict_most_texts
    assert ask(client, inputs=["a"] * most).status_code == 200
    assert ask(client, inputs=["a"] * (most + 1)).status_code == 413


@pytest.mark.parametrize("path", ["/predict", "/v1/classify"])
def test_before_any_promotion_prediction_is_unavailable(offline: Platform, path: str) -> None:
    response = offline.client().post(path, json={"inputs" if path == "/predict" else "input": "a"})
    assert response.status_code == 503
    assert response.json()["type"].endswith(":no-student")
    assert "promote" in response.json()["detail"]
    assert response.headers["retry-after"]


@pytest.mark.parametrize(
    ("failure", "status", "slug"),
    [
        (Overloaded(2.2), 429, "overloaded"),
        (RequestTooLarge(10, 5), 413, "too-large"),
        (UnusableText(0, "is empty"), 422, "unusable-text"),
        (EngineFailed("secret"), 500, "engine-failed"),
    ],
)
def test_each_failure_of_serving_has_its_problem(
    client: TestClient, offline: Platform, failure: Any, status: int, slug: str
) -> None:
    offline.predictor.failure = failure
    response = ask(client, inputs="a")
    assert response.status_code == status
    assert response.json()["type"].endswith(f":{slug}")
    assert "secret" not in response.text


@pytest.mark.parametrize("character", ["\x01", "\x08", "\x1b", "\x1f", "\x7f"])
def test_a_control_character_is_rejected_by_code_point(
    client: TestClient, offline: Platform, character: str
) -> None:
    response = ask(client, inputs=["好", f"a{character}b"])
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert error["field"] == "inputs.1"
    assert f"U+{ord(character):04X}" in error["message"]
    assert offline.predictor.seen == []


def test_line_breaks_and_non_ascii_characters_are_accepted(client: TestClient) -> None:
    assert ask(client, inputs="a\tb\r\nc\vd\fe \x85 \u2028 好\u200d").status_code == 200


def test_overload_sends_retry_after(client: TestClient, offline: Platform) -> None:
    offline.predictor.failure = Overloaded(2.2)
    assert ask(client, inputs="a").headers["retry-after"] == "3"


def test_classify_answers_in_vllms_shape(client: TestClient) -> None:
    answer = client.post("/v1/classify", json={"model": "reviews", "input": ["好", "a b"]}).json()
    assert answer["object"] == "list"
    assert answer["model"] == "reviews"
    assert answer["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    assert answer["data"][1] == {
        "index": 1,
        "label": "positive",
        "probs": [pytest.approx(1 / 3), pytest.approx(2 / 3)],  # in the order of classes
        "num_classes": 2,
    }


def test_classify_with_several_heads_keeps_the_plain_fields_for_the_first(
    client: TestClient,
) -> None:
    answer = client.post("/v1/classify?alias=challenger", json={"input": "好"}).json()
    text = answer["data"][0]
    assert (text["label"], text["num_classes"]) == ("positive", 2)
    assert list(text["heads"]) == ["sentiment", "domain"]
    assert text["heads"]["domain"]["labels"] == sorted(DOMAINS)


@pytest.mark.parametrize("name", ["reviews", "mdl_1_1", "default"])
def test_classify_accepts_the_models_name_version_or_alias(client: TestClient, name: str) -> None:
    response = client.post("/v1/classify", json={"model": name, "input": "a"})
    assert response.status_code == 200


def test_classify_for_a_model_that_does_not_serve_is_not_found(client: TestClient) -> None:
    response = client.post("/v1/classify", json={"model": "gpt", "input": "a"})
    assert response.status_code == 404


def test_classify_truncates_only_for_minus_one(client: TestClient) -> None:
    long = "w " * 9
    assert client.post("/v1/classify", json={"input": long}).status_code == 422
    body = {"input": long, "truncate_prompt_tokens": -1}
    assert client.post("/v1/classify", json=body).status_code == 200
    body["truncate_prompt_tokens"] = 5
    assert client.post("/v1/classify", json=body).status_code == 422


@pytest.mark.anyio
async def test_a_prediction_is_cancelled_when_its_client_disconnects(
    offline: Platform, one_head: FakeStudent, monkeypatch: pytest.MonkeyPatch
) -> None:
    offline.predictor.students["default"] = one_head
    started, cancelled = asyncio.Event(), asyncio.Event()
    body: list[Message] = [{"type": "http.request", "body": b'{"inputs": "a"}', "more_body": False}]
    sent: list[Message] = []

    async def endless(texts: list[str], *, truncate: bool, alias: str) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    async def receive() -> Message:
        if body:
            return body.pop()
        await started.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    monkeypatch.setattr(offline.predictor, "predict", endless)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/predict",
        "query_string": b"",
        "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
    }
    app = create_app(offline.context())
    await asyncio.wait_for(app(scope, receive, send), 20)
    assert cancelled.is_set()
    assert sent == []


def test_an_alias_that_was_never_promoted_is_not_found(platform: Platform) -> None:
    response = platform.client().post("/predict?alias=rival", json={"inputs": "a"})
    assert (response.status_code, response.json()["type"]) == (
        404,
        "urn:stillhouse:problem:not-found",
    )


def test_an_alias_whose_student_is_still_loading_is_unavailable(desk: JobDriver) -> None:
    desk.store.promote(desk.succeed(desk.running()), alias="rival")
    assert desk.client.post("/predict?alias=rival", json={"inputs": "a"}).status_code == 503
