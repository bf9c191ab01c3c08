"""Checks for schemathesis, loaded by hooks.py: every error is a problem document of a known type.

Runs in the environment of tests/fuzz/requirements.txt, without our code: the known types come from an
environment variable as JSON, slug to status.
"""

from __future__ import annotations

import json
import os
from typing import Any

import schemathesis

KINDS: dict[str, int] = json.loads(os.environ["FUZZ_PROBLEM_KINDS"])
PREFIX = "urn:stillhouse:problem:"
MEMBERS = {"type": str, "title": str, "status": int, "detail": str, "instance": str}
SAFE = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
}


@schemathesis.check  # type: ignore[untyped-decorator]
def every_error_is_a_problem_document(ctx: Any, response: Any, case: Any) -> None:
    if response.status_code < 400:
        return
    media_type = response.headers["content-type"][0]
    assert media_type == "application/problem+json", f"an error of the media type {media_type}"
    if case.method.upper() == "HEAD":
        return
    problem = json.loads(response.content)
    for member, kind in MEMBERS.items():
        assert type(problem.get(member)) is kind, f"{member} is {problem.get(member)!r}"
    assert problem["status"] == response.status_code
    slug = problem["type"].removeprefix(PREFIX)
    assert KINDS.get(slug) == response.status_code, f"{problem['type']} with {response.status_code}"
    if response.status_code in (429, 503):
        assert int(response.headers["retry-after"][0]) >= 1


@schemathesis.check  # type: ignore[untyped-decorator]
def every_answer_has_safe_headers(ctx: Any, response: Any, case: Any) -> None:
    for name, value in SAFE.items():
        assert response.headers.get(name) == [value], f"{name}: {response.headers.get(name)}"
