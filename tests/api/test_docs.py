"""docs/http.md lists exactly the existing routes and problems."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from services.api.auth.keys import Scope
from services.api.problems import PROBLEM_TYPES
from tests.api.harness import Platform

PAGE = Path(__file__).parents[2] / "docs" / "http.md"


@pytest.fixture(scope="module")
def text() -> str:
    return PAGE.read_text("utf-8")


@pytest.fixture
def document(offline: Platform) -> dict[str, Any]:
    document: dict[str, Any] = offline.client().get("/openapi.json").json()
    return document


def test_docs_list_exactly_the_existing_routes(text: str, document: dict[str, Any]) -> None:
    routes = {
        f"{method.upper()} {path}"
        for path, operations in document["paths"].items()
        for method in operations
    }
    table = text.split("## Routes")[1].split("## Prediction")[0]
    assert set(re.findall(r"`((?:GET|POST|DELETE) /[^` ]*)`", table)) == routes


def test_docs_list_every_problem_with_its_status(text: str) -> None:
    listed = re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", text, re.MULTILINE)
    assert {slug: int(status) for slug, status in listed} == {
        slug: status for slug, (status, _) in PROBLEM_TYPES.items()
    }


def test_docs_list_every_scope(text: str) -> None:
    assert {f"`{scope}`" for scope in Scope} <= set(re.findall(r"`[a-z]+`", text))


def test_every_operation_documents_its_problems_and_has_a_name(document: dict[str, Any]) -> None:
    names = []
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            names.append(operation["operationId"])
            assert operation["tags"], (method, path)
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    content = response["content"]["application/problem+json"]
                    assert content["schema"] == {"$ref": "#/components/schemas/Problem"}
                    assert "application/json" not in response["content"]
    assert len(set(names)) == len(names)


def test_every_reference_of_the_document_resolves(document: dict[str, Any]) -> None:
    def references(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(references, value))
        if not isinstance(value, dict):
            return set()
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(item) for item in value.values()))

    known = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert references(document) <= known


def test_a_server_without_keys_documents_no_security(document: dict[str, Any]) -> None:
    assert "securitySchemes" not in document["components"]
    assert not any(
        "security" in operation
        for operations in document["paths"].values()
        for operation in operations.values()
    )
