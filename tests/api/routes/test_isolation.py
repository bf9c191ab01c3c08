"""Every route, by keys of two projects and of every scope. A route without a row here fails the tests."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from httpx2 import Response

from services.api.app import create_app
from services.api.auth.keys import Scope
from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.projects import Access
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.state import Reason
from tests.api.auth.key_entries import bearer, keys_of
from tests.api.fakes import FakeStudent
from tests.api.harness import JobDriver, Platform
from tests.factories import SENTIMENT, dataset_card

MODEL = {"config": {"model_type": "qwen3"}, "tokenizer": {"train": True}}
TEACHERS_TOKENIZER = {"config": {"model_type": "qwen3"}, "tokenizer": "teacher"}


@dataclass
class Resources:
    """What a project has: the ids that requests name."""

    dataset_id: str
    job_id: str  # failed, with a log
    queued_id: str
    model_id: str


Request = Callable[[Resources], dict[str, Any]]  # what `TestClient.request` takes


@dataclass(frozen=True)
class Route:
    """What a route needs, and what becomes of a request that names resources of a project."""

    scope: Scope | None  # None: no key at all
    own: int  # status for the resources of the caller's project
    other: int  # status for those of another project
    request: Request = lambda _: {}


def _spec(has: Resources) -> dict[str, Any]:
    return {"json": {"kind": "teacher", "dataset_id": has.dataset_id, "model": MODEL}}


ROUTES: dict[str, Route] = {
    "GET /livez": Route(None, 200, 200),
    "GET /readyz": Route(None, 200, 200),
    "GET /health": Route(None, 200, 200),
    "GET /metrics": Route(Scope.METRICS, 200, 200),
    "GET /datasets": Route(Scope.READ, 200, 200),
    "GET /datasets/{dataset_id}": Route(Scope.READ, 200, 404),
    "GET /datasets/{dataset_id}/statistics": Route(Scope.READ, 404, 404),
    "DELETE /datasets/{dataset_id}": Route(Scope.SUBMIT, 409, 404),
    "POST /datasets/{dataset_id}/restore": Route(Scope.SUBMIT, 409, 404),
    "POST /datasets": Route(Scope.SUBMIT, 422, 422),
    "POST /datasets/preview": Route(Scope.SUBMIT, 422, 422),
    "POST /jobs/plan": Route(Scope.READ, 200, 422, _spec),
    "POST /jobs": Route(Scope.SUBMIT, 202, 422, _spec),
    "GET /jobs": Route(Scope.READ, 200, 200),
    "GET /jobs/events": Route(Scope.READ, 200, 200),
    "GET /jobs/{job_id}": Route(Scope.READ, 200, 404),
    "GET /jobs/{job_id}/events": Route(Scope.READ, 200, 404),
    "GET /jobs/{job_id}/logs": Route(Scope.READ, 200, 404),
    "GET /jobs/{job_id}/memory": Route(Scope.READ, 200, 404),
    "GET /jobs/{job_id}/metrics": Route(Scope.READ, 200, 404),
    "GET /jobs/{job_id}/label-quality": Route(Scope.READ, 404, 404),
    "POST /jobs/{job_id}/cancel": Route(Scope.SUBMIT, 409, 404),
    "POST /jobs/{job_id}/retry": Route(Scope.SUBMIT, 202, 404),
    "DELETE /jobs/{job_id}": Route(Scope.SUBMIT, 409, 404),
    "POST /jobs/{job_id}/restore": Route(Scope.SUBMIT, 409, 404),
    "POST /diagnoses": Route(Scope.READ, 200, 200, lambda _: {"json": {"log": "out of memory"}}),
    "GET /models": Route(Scope.READ, 200, 200),
    "GET /models/{model_id}": Route(Scope.READ, 200, 404),
    "GET /models/{model_id}/files": Route(Scope.READ, 200, 404),
    "GET /models/{model_id}/files/{name}": Route(Scope.READ, 200, 404),
    "DELETE /models/{model_id}": Route(Scope.PROMOTE, 409, 404),
    "POST /models/{model_id}/restore": Route(Scope.PROMOTE, 409, 404),
    "POST /models/{model_id}/promote": Route(Scope.PROMOTE, 201, 404),
    "GET /promotions": Route(Scope.READ, 200, 200),
    "GET /audit": Route(Scope.ADMIN, 403, 403),
    "GET /maintenance": Route(Scope.READ, 200, 200),
    "GET /node": Route(Scope.READ, 200, 200),
    "GET /base-models": Route(Scope.READ, 200, 200),
    "GET /devices": Route(Scope.READ, 200, 200),
    "POST /session": Route(None, 201, 201),
    "GET /session": Route(None, 200, 200),
    "DELETE /session": Route(None, 204, 204),
    "POST /maintenance": Route(Scope.ADMIN, 403, 403, lambda _: {"json": {"on": False}}),
    "POST /predict": Route(Scope.PREDICT, 200, 200, lambda _: {"json": {"inputs": "a b"}}),
    "POST /v1/classify": Route(Scope.PREDICT, 200, 200, lambda _: {"json": {"input": "a b"}}),
}
IMPLIED = {Scope.READ: {Scope.SUBMIT, Scope.PROMOTE}}


_ALL_OF_A_PROJECT = [each for each in Scope if each is not Scope.ADMIN]
KEYS = keys_of(
    **{str(scope): ("ours", [scope]) for scope in Scope},
    ours=("ours", _ALL_OF_A_PROJECT),
    theirs=("theirs", _ALL_OF_A_PROJECT),
    operator=("default", [Scope.ADMIN]),
)


def _send(client: TestClient, route: str, has: Resources, key: str | None) -> Response:
    method, path = route.split(" ")
    names = {"dataset_id": has.dataset_id, "job_id": has.job_id, "model_id": has.model_id}
    names["name"] = MANIFEST
    headers = {} if key is None else bearer(key)
    return client.request(
        method, path.format_map(names), headers=headers, **ROUTES[route].request(has)
    )


def _fill(desk: JobDriver, project: str) -> Resources:
    """Give a project a dataset, a failed job with a log, a queued one, a model and a promotion."""
    store = desk.store.within(Access(project=project, sees_all=False, actor=project))
    headers = bearer(project)
    dataset_id = store.add_dataset(dataset_card()).id
    spec = {"kind": "teacher", "dataset_id": dataset_id, "model": MODEL, "name": f"of {project}"}
    ids = [desk.client.post("/jobs", json=spec, headers=headers).json()["id"] for _ in range(3)]
    claims = [desk.store.claim(job_id, worker="w", lease_seconds=60) for job_id in ids[:2]]
    assert claims[0] is not None
    assert claims[1] is not None
    log = RunDirectory(desk.platform.settings.run_dir(ids[0], 1)).log
    log.parent.mkdir(parents=True)
    log.write_text(f"secret of {project}")
    desk.end(claims[0], Outcome(end=End.FAILED, reason=Reason.CRASHED, message="Crashed."))
    model_id = desk.succeed(claims[1])
    store.promote(model_id)
    return Resources(dataset_id, ids[0], ids[2], model_id)


@dataclass
class Projects:
    """An application with two projects."""

    desk: JobDriver
    client: TestClient
    ours: Resources
    theirs: Resources


@pytest.fixture
def projects(platform: Platform) -> Projects:
    platform.keys = KEYS
    for project in ("ours", "theirs"):
        platform.predictor.students[f"{project}/default"] = FakeStudent(project, "v1", [SENTIMENT])
    desk = JobDriver(platform)
    return Projects(desk, desk.client, _fill(desk, "ours"), _fill(desk, "theirs"))


def test_every_route_has_a_row(offline: Platform) -> None:
    document = offline.client().get("/openapi.json").json()
    routes = {
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method in operations
    }
    assert routes == set(ROUTES)


def test_each_route_takes_exactly_the_scopes_of_its_row(projects: Projects) -> None:
    for route, expected in ROUTES.items():
        for scope in Scope:
            status = _send(projects.client, route, projects.ours, str(scope)).status_code
            permitted = expected.scope is None or scope in (
                {expected.scope, Scope.ADMIN} | IMPLIED.get(expected.scope, set())
            )
            assert (status != 403) is permitted, (route, scope, status)
            assert status < 500, (route, scope, status)


def test_a_key_reaches_the_resources_of_its_own_project(projects: Projects) -> None:
    for route, expected in ROUTES.items():
        response = _send(projects.client, route, projects.ours, "ours")
        assert response.status_code == expected.own, (route, response.text)


def test_a_resource_of_another_project_is_answered_like_an_unknown_one(projects: Projects) -> None:
    nothing = Resources("ds_0", "job_0", "job_0", "mdl_0_1")
    for route, expected in ROUTES.items():
        response = _send(projects.client, route, projects.theirs, "ours")
        assert response.status_code == expected.other, (route, response.text)
        unknown = _send(projects.client, route, nothing, "ours")
        assert unknown.status_code == expected.other, (route, unknown.text)
        if expected.own != expected.other:
            assert _shape(response, projects.theirs) == _shape(unknown, nothing), route


def _shape(response: Response, has: Resources) -> str:
    """Return a body without the ids that the request named."""
    text = response.text
    for number, each in enumerate((has.dataset_id, has.job_id, has.queued_id, has.model_id)):
        text = text.replace(each, f"<{min(number, 1) if number < 3 else number}>")
    return text


def test_an_operator_reaches_the_resources_of_every_project(projects: Projects) -> None:
    for route, expected in ROUTES.items():
        if route in ("POST /jobs", "POST /jobs/plan", "POST /predict", "POST /v1/classify"):
            continue  # these happen in the key's own project
        response = _send(projects.client, route, projects.theirs, "operator")
        permitted = 200 if expected.scope is Scope.ADMIN else expected.own
        assert response.status_code == permitted, (route, response.text)


def test_nothing_of_another_project_appears_in_any_answer(projects: Projects) -> None:
    """Every GET without a resource in its path, by a key that may do everything in its project."""
    theirs = projects.theirs
    hidden = (theirs.dataset_id, theirs.job_id, theirs.queued_id, theirs.model_id, "of theirs")
    for route in ROUTES:
        if not route.startswith("GET") or "{" in route or route == "GET /metrics":
            continue
        text = _send(projects.client, route, theirs, "ours").text
        assert not [each for each in hidden if each in text], route
    lists = ["/datasets", "/jobs", "/models", "/promotions"]
    for path in lists:
        found = projects.client.get(path, headers=bearer("operator")).json()["items"]
        assert {"ours", "theirs"} <= {item["project"] for item in found}, path
        own = projects.client.get(path, headers=bearer("ours")).json()["items"]
        assert {item["project"] for item in own} == {"ours"}, path


def _references(theirs: Resources) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each field that refers to something, and what a spec with it in another project has."""
    teacher = {"kind": "teacher", "model": MODEL}
    yield "dataset_id", teacher | {"dataset_id": theirs.dataset_id}
    yield "model.model_id", {"kind": "teacher", "model": {"model_id": theirs.model_id}}
    yield "teacher.model_id", {"teacher": {"model_id": theirs.model_id}}
    yield "teacher.job_id", {"teacher": {"job_id": theirs.queued_id}}
    yield "teacher.job_id", {"teacher": {"job_id": theirs.job_id}}
    yield "student.model_id", {"student": {"model_id": theirs.model_id}}
    unlabelled = {"unlabelled_dataset_ids": [theirs.dataset_id]}
    yield "distillation.unlabelled_dataset_ids.0", {"distillation": unlabelled}


def test_no_field_of_a_spec_refers_to_another_project(projects: Projects) -> None:
    ours = projects.ours
    whole = {
        "kind": "distill",
        "dataset_id": ours.dataset_id,
        "teacher": {"model_id": ours.model_id},
        "student": TEACHERS_TOKENIZER,
    }
    nothing = Resources("ds_0", "job_0", "job_0", "mdl_0_1")
    for field, body in _references(projects.theirs):
        spec = {"dataset_id": ours.dataset_id} | body if "kind" in body else whole | body
        for key in ("ours", "operator"):
            response = projects.client.post("/jobs", json=spec, headers=bearer(key))
            assert response.status_code == 422, (field, response.text)
        response = projects.client.post("/jobs", json=spec, headers=bearer("ours"))
        assert response.json()["errors"][0]["field"] == field
        unknown = json.loads(
            json.dumps(spec)
            .replace(projects.theirs.dataset_id, nothing.dataset_id)
            .replace(projects.theirs.model_id, nothing.model_id)
            .replace(projects.theirs.queued_id, nothing.job_id)
            .replace(projects.theirs.job_id, nothing.job_id)
        )
        same = projects.client.post("/jobs", json=unknown, headers=bearer("ours"))
        assert _shape(same, nothing) == _shape(response, projects.theirs), field
    accepted = projects.client.post("/jobs", json=whole, headers=bearer("ours"))
    assert accepted.status_code == 202, accepted.text


def test_an_alias_is_resolved_in_the_project_of_the_key(projects: Projects) -> None:
    for project in ("ours", "theirs"):
        response = projects.client.post(
            "/predict", json={"inputs": "a", "detail": True}, headers=bearer(project)
        )
        assert response.json()["model"] == project
    projects.desk.store.within(Access(project="theirs")).promote(
        projects.theirs.model_id, alias="challenger"
    )
    for project, status in (("ours", 404), ("theirs", 503)):
        response = projects.client.post(
            "/predict?alias=challenger", json={"inputs": "a"}, headers=bearer(project)
        )
        assert response.status_code == status, project


def test_an_idempotency_key_belongs_to_a_project(projects: Projects) -> None:
    def submit(project: str, has: Resources) -> Response:
        headers = bearer(project) | {"Idempotency-Key": "nightly"}
        return projects.client.post("/jobs", headers=headers, **_spec(has))

    first, second = submit("ours", projects.ours), submit("theirs", projects.theirs)
    assert (first.status_code, second.status_code) == (202, 202)
    assert first.json()["id"] != second.json()["id"]
    assert submit("ours", projects.ours).json()["id"] == first.json()["id"]


def test_a_retry_by_an_operator_stays_in_the_project_of_its_job(projects: Projects) -> None:
    path = f"/jobs/{projects.theirs.job_id}/retry"
    again = projects.client.post(path, headers=bearer("operator")).json()
    assert (again["project"], again["created_by"]) == ("theirs", "operator")


def test_health_shows_the_models_of_the_callers_project(projects: Projects) -> None:
    projects.desk.platform.predictor.students["default"] = FakeStudent("plain", "v", [SENTIMENT])

    def shown(**headers: str) -> set[str]:
        models = projects.client.get("/health", headers=headers).json()["models"]
        return {model["name"] for model in models.values()}

    assert shown() == {"plain"}
    assert shown(**bearer("ours")) == {"ours"}
    assert shown(**bearer("operator")) == {"plain", "ours", "theirs"}


def test_promotions_name_the_key(projects: Projects) -> None:
    path = f"/models/{projects.ours.model_id}/promote"
    promoted = projects.client.post(path, headers=bearer("ours")).json()
    assert (promoted["promoted_by"], promoted["project"]) == ("ours", "ours")
    newest = projects.client.get("/promotions", headers=bearer("ours")).json()["items"][0]
    assert newest["promoted_by"] == "ours"


def test_routes_use_only_the_store_of_the_caller(offline: Platform) -> None:
    """The matrix sends one request each; this finds a branch that it does not reach."""
    app = create_app(offline.context())
    for route in app.routes:
        if isinstance(route, APIRoute):
            assert "context.store" not in _source(route), route.path


def _source(route: APIRoute) -> str:
    module = inspect.getmodule(route.endpoint)
    assert module is not None
    return inspect.getsource(module)
