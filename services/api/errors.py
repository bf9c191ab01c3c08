"""Every error leaves as a problem document (RFC 9457): this is where it gets its words.

A problem's `type` is a stable URN made of the slugs below; `title` belongs to the type, `detail` to
the occurrence. Extension members: `errors` (field and message), `faults` (datasets),
`plan` (memory), `request_id` (server errors). HTTP words live in this room only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.api.serving.errors import (
    NoStudent,
    Overloaded,
    PredictionError,
    RefusedInput,
    RequestTooLarge,
)
from services.shared.datasets.upload import DatasetRejected
from services.shared.jobs.errors import (
    Conflict,
    DoesNotFit,
    GateNotPassed,
    InvalidInput,
    InvalidTransition,
    NotFound,
    StillhouseError,
    Unavailable,
)
from services.shared.memory import errors as memory

log = structlog.get_logger(__name__)

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:stillhouse:problem:"
MOST_FIELD_ERRORS = 20
LONGEST_MESSAGE = 500  # characters; a message may quote what the client sent
RETRY_AFTER_SECONDS = 5

TITLES: dict[str, tuple[int, str]] = {
    "malformed-request": (400, "The request cannot be read"),
    "unauthorized": (401, "A valid API key is needed"),
    "forbidden": (403, "The API key lacks the scope"),
    "not-found": (404, "There is no such thing"),
    "method-not-allowed": (405, "The method is not allowed here"),
    "conflict": (409, "The thing is in another state"),
    "invalid-transition": (409, "The job cannot move there"),
    "gate-not-passed": (409, "The student did not pass its gate"),
    "too-large": (413, "The body is too large"),
    "unsupported-media-type": (415, "The media type is not understood"),
    "invalid-request": (422, "The request contradicts itself or its schema"),
    "invalid-dataset": (422, "The dataset has faults"),
    "does-not-fit": (422, "The job would run out of memory"),
    "unusable-text": (422, "A text cannot be classified"),
    "text-too-long": (422, "A text is longer than the model reads"),
    "overloaded": (429, "Too much is asked at once"),
    "rate-limited": (429, "The caller asks too often"),
    "internal": (500, "Something broke on the server"),
    "engine-failed": (500, "The model could not answer"),
    "disk-full": (507, "The disk of the server is full"),
    "no-student": (503, "No model is promoted"),
    "unavailable": (503, "A part of the platform cannot be reached"),
}


class FieldError(BaseModel):
    """What is wrong with one field of the request."""

    field: str = Field(description="Dotted path, for example `training.epochs`; `query.limit`.")
    message: str


class Problem(BaseModel):
    """A problem document (RFC 9457)."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "type": f"{TYPE_PREFIX}not-found",
                "title": "There is no such thing",
                "status": 404,
                "detail": "There is no job 'job_01kb6ztn8e0wq'.",
                "instance": "/jobs/job_01kb6ztn8e0wq",
            }
        },
    )

    type: str
    title: str
    status: int
    detail: str
    instance: str
    errors: list[FieldError] | None = None


class ProblemError(Exception):
    """Raised inside this room where no error of the shared rooms says it."""

    def __init__(
        self,
        slug: str,
        detail: str,
        *,
        errors: Sequence[FieldError] = (),
        headers: Mapping[str, str] | None = None,
        **extensions: Any,
    ) -> None:
        super().__init__(detail)
        self.slug = slug
        self.detail = detail
        self.headers = dict(headers or {})
        self.extensions = extensions
        if errors:
            self.extensions["errors"] = [error.model_dump() for error in errors]


KNOWN: tuple[type[Exception], ...] = (
    ProblemError,
    StillhouseError,
    PredictionError,
    memory.InvalidInput,
    DatasetRejected,
    RequestValidationError,
    HTTPException,
)


def invalid(field: str, message: str) -> ProblemError:
    """Return the problem of one wrong field."""
    return ProblemError(
        "invalid-request", message[:LONGEST_MESSAGE], errors=[_blamed(field, message)]
    )


def _blamed(field: str, message: str) -> FieldError:
    return FieldError(field=field, message=message[:LONGEST_MESSAGE])


def problem_response(problem: ProblemError, *, path: str) -> Response:
    """Return the document for `problem` on `path`."""
    status, title = TITLES[problem.slug]
    body = {
        "type": TYPE_PREFIX + problem.slug,
        "title": title,
        "status": status,
        "detail": problem.detail[:LONGEST_MESSAGE],
        "instance": quote(path[:LONGEST_MESSAGE], safe="/:@!$&'()*+,;=~", errors="replace"),
        **problem.extensions,
    }
    # ensure_ascii: whatever a client managed to send back into a message stays encodable.
    return Response(json.dumps(body), status, problem.headers, MEDIA_TYPE)


def install(app: FastAPI) -> None:
    """Answer every exception that the app knows with a problem document."""
    for kind in KNOWN:
        app.add_exception_handler(kind, answer_problem)


async def answer_problem(request: Request, error: Exception) -> Response:
    """Return the document for an exception of the kinds in KNOWN."""
    problem = as_problem(error)
    if problem.slug == "method-not-allowed":
        problem.headers["Allow"] = ", ".join(_allowed(request))
    return problem_response(problem, path=request.url.path)


def _allowed(request: Request) -> list[str]:
    # The router knows only the methods of the first route on a path, the document all of them.
    operations = request.app.openapi()["paths"][request.scope["route"].path]
    return [method.upper() for method in operations]


def as_problem(error: Exception) -> ProblemError:
    """Translate an exception of any room into a problem; the unknown become `internal`."""
    if isinstance(error, ProblemError):
        return error
    if isinstance(error, RequestValidationError):
        return _from_validation(error)
    if isinstance(error, HTTPException):
        return _from_http(error)
    if isinstance(error, PredictionError):
        return _from_prediction(error)
    if isinstance(error, DatasetRejected):
        return _from_dataset(error)
    if isinstance(error, memory.InvalidInput):
        return invalid(error.field, str(error))
    return _from_stillhouse(error)


def _from_stillhouse(error: Exception) -> ProblemError:
    match error:
        case NotFound():
            return ProblemError("not-found", str(error))
        case InvalidInput(field=str(field)):
            return invalid(field, str(error))
        case InvalidInput():
            return ProblemError("invalid-request", str(error))
        case DoesNotFit():
            blamed = [] if error.field is None else [_blamed(error.field, str(error))]
            return ProblemError("does-not-fit", str(error), errors=blamed, plan=error.plan)
        case InvalidTransition():
            return ProblemError("invalid-transition", str(error))
        case GateNotPassed():
            return ProblemError("gate-not-passed", str(error))
        case Conflict():
            return ProblemError("conflict", str(error))
        case Unavailable():
            log.warning("unavailable", error=str(error))
            return ProblemError(
                "unavailable",
                "A part that this request needs cannot be reached now; try again.",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
    return ProblemError("internal", "An unexpected error; the server's log says more.")


def _from_prediction(error: PredictionError) -> ProblemError:
    match error:
        case NoStudent():
            retry = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            return ProblemError("no-student", str(error), headers=retry)
        case Overloaded():
            retry = {"Retry-After": str(math.ceil(error.retry_after_seconds))}
            return ProblemError("overloaded", str(error), headers=retry)
        case RequestTooLarge():
            return ProblemError("too-large", str(error))
        case RefusedInput():
            return ProblemError("unusable-text", str(error))
    log.error("engine_failed", error=str(error))
    return ProblemError("engine-failed", "The model could not answer; the server's log says more.")


def _from_dataset(error: DatasetRejected) -> ProblemError:
    faults = [
        {**fault.model_dump(), "message": fault.message[:LONGEST_MESSAGE]} for fault in error.faults
    ]
    detail = f"The upload has {error.total} fault(s); the first: {error.faults[0]}"
    return ProblemError("invalid-dataset", detail, faults=faults, total_faults=error.total)


def _from_http(error: HTTPException) -> ProblemError:
    by_status = {
        400: ("malformed-request", "The body cannot be parsed as its media type says."),
        404: ("not-found", "There is nothing at this path; /docs lists what there is."),
        405: ("method-not-allowed", "The path exists, but not for this method; see Allow."),
        413: ("too-large", str(error.detail)),
        415: ("unsupported-media-type", str(error.detail)),
    }
    slug, detail = by_status.get(error.status_code, ("internal", str(error.detail)))
    return ProblemError(slug, detail, headers=error.headers)


def _from_validation(error: RequestValidationError) -> ProblemError:
    found = list(error.errors())
    if any(item["type"] == "json_invalid" for item in found):
        return ProblemError("malformed-request", f"The body is not JSON: {_reason(found[0])}.")
    fields = [_field_error(item, error.body) for item in found]
    unique = list({(item.field, item.message): item for item in fields}.values())
    kept = unique[:MOST_FIELD_ERRORS]
    detail = f"{kept[0].field}: {kept[0].message}"
    if len(unique) > 1:
        detail += f" (and {len(unique) - 1} more; see errors)"
    return ProblemError("invalid-request", detail, errors=kept)


def _reason(item: Mapping[str, Any]) -> str:
    position = item["loc"][-1]
    return f"{item.get('ctx', {}).get('error', 'syntax error')} at character {position}"


def _field_error(item: Mapping[str, Any], body: Any) -> FieldError:
    place, *path = item["loc"]
    names = [str(part) for part in path]
    if place == "body":
        names = _names_in_body(path, body, missing=item["type"] == "missing")
    elif place != "body":
        names.insert(0, str(place))
    message = str(item["msg"]).removeprefix("Value error, ")[:LONGEST_MESSAGE]
    return FieldError(field=".".join(names) or "body", message=message)


def _names_in_body(path: Sequence[str | int], body: Any, *, missing: bool) -> list[str]:
    """Keep the parts of a validator's path that the client wrote: union tags and model names go."""
    names: list[str] = []
    value = body
    for position, part in enumerate(path):
        if _has(value, part):
            value = value[part]
        elif not (missing and position == len(path) - 1):
            continue
        names.append(str(part)[:LONGEST_MESSAGE])
    return names


def _has(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, Mapping) and part in value
