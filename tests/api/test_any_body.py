"""Every request gets a success or a problem document, and never a 5xx."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi.testclient import TestClient
from httpx2 import Response
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.api.admission import Admission
from tests.api.fakes import FakeStudent
from tests.api.harness import JobDriver
from tests.sandboxes import sandboxes

ONE_APP = settings(
    max_examples=int(os.environ.get("STILLHOUSE_FUZZ_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    derandomize="STILLHOUSE_FUZZ_EXAMPLES" not in os.environ,
)

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.sampled_from([2**31, 2**63 - 1, -(2**63), 2**63, 2**200, 0, -1]),
    st.floats(),
    st.text(),
    st.sampled_from(["\x00", "\ud800", "\x1b[31m", "..", "/", "/etc", "~", "a" * 5000, "", " "]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)
ANYTHING = st.recursive(ODD, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))

MODEL = {"config": {"model_type": "qwen3", "hidden_size": 8}, "tokenizer": {"train": True}}
TEACHER = {
    "kind": "teacher",
    "name": "a",
    "model": MODEL,
    "heads": ["sentiment"],
    "training": {"epochs": 1, "max_steps": 5, "seed": 1},
    "recipe": {"optimizer": "adamw", "compute": "bfloat16"},
    "resources": {"ranks": 2, "device": "cpu", "device_memory": "1GiB", "visible_devices": [0, 1]},
}
DISTILL = {
    "kind": "distill",
    "teacher": {"path": "somewhere"},
    "student": MODEL,
    "distillation": {"temperature": 2, "head_weights": {"sentiment": 1}},
    "gate": {"min_macro_f1_share": 0.9},
}

SPECS = [
    TEACHER,
    DISTILL,
    {**TEACHER, "model": {"path": "x"}},
    {**TEACHER, "model": {"model_id": "mdl_1_1"}},
    {**DISTILL, "teacher": {"model_id": "mdl_1_1"}},
    {**DISTILL, "teacher": {"job_id": "job_1"}},
    {
        "kind": "chain",
        "teacher": {key: value for key, value in TEACHER.items() if key != "kind"},
        "distill": {key: DISTILL[key] for key in ("student", "distillation", "gate")},
    },
]


def paths_of(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if not isinstance(value, dict | list):
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield from paths_of(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy of `value` with something else at `path`."""
    if not path:
        return new
    value = copy.deepcopy(value)
    place = value
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return value


@st.composite
def mutated(draw: st.DrawFn, bodies: list[Any]) -> Any:
    body = draw(st.sampled_from(bodies))
    path = draw(st.sampled_from(list(paths_of(body))))
    return replaced(body, path, draw(ANYTHING))


def assert_valid_response(response: Response) -> None:
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/problem+json"
        body = response.json()
        assert {"type", "title", "status", "detail", "instance"} <= body.keys()
        assert body["status"] == response.status_code
    response.json()


def post(client: TestClient, path: str, body: Any) -> Response:
    text = json.dumps(body)  # ASCII, with NaN and lone surrogates as escapes
    return client.post(path, content=text, headers={"content-type": "application/json"})


@dataclass(frozen=True)
class Seeded:
    """A client of a platform that holds a dataset, a failed job and a model, and their ids."""

    client: TestClient
    dataset_id: str
    job_id: str
    model_id: str


@pytest.fixture
def seeded(desk: JobDriver, one_head: FakeStudent) -> Seeded:
    platform = desk.platform
    platform.predictor.students["default"] = one_head
    platform.admission = Admission(platform.store, platform.settings, sandboxes().calculations)
    claim = desk.running()
    desk.fail(claim)
    model_id = desk.succeed(desk.running())
    return Seeded(platform.client(), desk.dataset_id, claim.job_id, model_id)


@pytest.fixture
def client(seeded: Seeded) -> TestClient:
    return seeded.client


@ONE_APP
@given(body=mutated(SPECS))
@pytest.mark.parametrize("path", ["/jobs", "/jobs/plan"])
def test_any_spec_is_accepted_or_rejected(seeded: Seeded, path: str, body: Any) -> None:
    if isinstance(body, dict):
        job = body["teacher"] if body.get("kind") == "chain" else body
        if isinstance(job, dict):
            job.setdefault("dataset_id", seeded.dataset_id)
    assert_valid_response(post(seeded.client, path, body))


@ONE_APP
@given(body=mutated([{"inputs": ["a"], "heads": ["sentiment"], "top_k": 1, "truncate": False}]))
def test_any_predict_request_is_answered(client: TestClient, body: Any) -> None:
    assert_valid_response(post(client, "/predict", body))


@ONE_APP
@given(body=mutated([{"input": ["a"], "model": "reviews", "truncate_prompt_tokens": -1}]))
def test_any_classify_request_is_answered(client: TestClient, body: Any) -> None:
    assert_valid_response(post(client, "/v1/classify", body))


@ONE_APP
@given(body=mutated([{"alias": "default", "force": True, "reason": "why"}]))
def test_any_promotion_is_answered(seeded: Seeded, body: Any) -> None:
    assert_valid_response(post(seeded.client, f"/models/{seeded.model_id}/promote", body))


@ONE_APP
@given(body=mutated([{"changes": {"optimizer": "sgd"}, "training": {"epochs": 1}}]))
def test_any_retry_is_answered(seeded: Seeded, body: Any) -> None:
    assert_valid_response(post(seeded.client, f"/jobs/{seeded.job_id}/retry", body))


@ONE_APP
@given(
    body=st.binary(),
    media_type=st.sampled_from(["application/json", "multipart/form-data; boundary=b", "x", ""]),
    path=st.sampled_from(["/jobs", "/predict", "/datasets", "/jobs/plan", "/v1/classify"]),
)
def test_any_bytes_are_answered(
    client: TestClient, body: bytes, media_type: str, path: str
) -> None:
    assert_valid_response(client.post(path, content=body, headers={"content-type": media_type}))


CASE = {
    "log": "CUDA out of memory. Tried to allocate 250.00 MiB",
    "model_name": "Qwen3-8B",
    "model": {"num_layers": 2, "hidden_size": 8, "vocab_size": 10, "num_heads": 2},
    "ranks": 2,
    "heads": [2],
    "device_memory_bytes": 2**36,
    "optimizer": "adamw",
    "sharding_strategy": "FSDP1 full_shard",
    "micro_batch": 1,
    "observed": {"sharded_units": 3, "dtypes": ["float32"]},
    "versions": {"torch": "2.13"},
}


@ONE_APP
@given(body=mutated([CASE]))
def test_any_case_is_diagnosed_or_rejected(client: TestClient, body: Any) -> None:
    assert_valid_response(post(client, "/diagnoses", body))


JSONL_ROW = {"text": "a", "sentiment": "good", "labels": {"sentiment": "x"}}


@ONE_APP
@given(
    content=st.binary()
    | st.lists(mutated([JSONL_ROW])).map(lambda rows: "\n".join(map(json.dumps, rows)).encode()),
    format=st.sampled_from(["jsonl", "csv", "parquet"]),
    text_column=st.text(max_size=3) | st.just("text"),
    heads=ANYTHING | st.just([{"name": "sentiment"}]) | mutated([[{"name": "a", "column": "b"}]]),
)
def test_any_upload_is_stored_or_rejected(
    client: TestClient, content: bytes, format: str, text_column: str, heads: Any
) -> None:
    form = {"format": format, "text_column": text_column, "heads": json.dumps(heads)}
    data = {name: value.encode("utf-8", "surrogatepass") for name, value in form.items()}
    response = client.post("/datasets", files={"file": ("f", content)}, data=data)
    assert_valid_response(response)


@ONE_APP
@given(
    path=st.sampled_from(["/jobs/{}", "/models/{}", "/datasets/{}", "/jobs/{}/logs"]),
    id=st.text(min_size=1),
)
def test_any_unknown_id_is_not_found(client: TestClient, path: str, id: str) -> None:
    quoted = "".join(f"%{byte:02X}" for byte in id.encode("utf-8", "surrogatepass"))
    assert client.get(path.format(quoted)).status_code in (404, 405)


@ONE_APP
@given(
    path=st.sampled_from(["/jobs", "/models", "/datasets", "/promotions"]),
    query=st.dictionaries(
        st.sampled_from(["cursor", "limit", "state", "kind", "alias"]),
        st.text() | st.integers().map(str),
    ),
)
def test_any_query_is_answered(client: TestClient, path: str, query: dict[str, str]) -> None:
    clean = {k: v.encode("utf-8", "replace").decode() for k, v in query.items()}
    assert_valid_response(client.get(path, params=clean))
