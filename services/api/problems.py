"""Problem documents (RFC 9457), the body of every error response.

A problem's `type` is a stable URN made of the slugs below; `title` belongs to the type, `detail` to
the occurrence. Extension members: `errors` (field and message), `faults` (datasets),
`plan` (memory), `request_id` (server errors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

MEDIA_TYPE = "application/problem+json"
TYPE_PREFIX = "urn:stillhouse:problem:"
MAX_FIELD_ERRORS = 20
MAX_MESSAGE_LENGTH = 500  # characters; a message may quote client input
RETRY_AFTER_SECONDS = 5

PROBLEM_TYPES: dict[str, tuple[int, str]] = {
    "malformed-request": (400, "Malformed request"),
    "unauthorized": (401, "Authentication required"),
    "forbidden": (403, "Forbidden"),
    "storage-quota-exceeded": (403, "Storage quota exceeded"),
    "not-found": (404, "Resource not found"),
    "method-not-allowed": (405, "Method not allowed"),
    "conflict": (409, "State conflict"),
    "invalid-transition": (409, "Invalid job state transition"),
    "gate-not-passed": (409, "Evaluation gate not passed"),
    "in-use": (409, "Resource in use"),
    "too-large": (413, "Request body too large"),
    "unsupported-media-type": (415, "Unsupported media type"),
    "invalid-request": (422, "Invalid request"),
    "invalid-dataset": (422, "Invalid dataset"),
    "does-not-fit": (422, "Job does not fit in memory"),
    "unusable-text": (422, "Unusable text"),
    "text-too-long": (422, "Text too long"),
    "quota-exceeded": (429, "Quota of queued jobs exceeded"),
    "overloaded": (429, "Server overloaded"),
    "rate-limited": (429, "Rate limit exceeded"),
    "internal": (500, "Internal server error"),
    "engine-failed": (500, "Prediction failed"),
    "disk-full": (507, "Insufficient storage"),
    "maintenance": (503, "Maintenance"),
    "no-student": (503, "No promoted model"),
    "unavailable": (503, "Service unavailable"),
}


class FieldError(BaseModel):
    """An error in one field of the request."""

    field: str = Field(description="Dotted path, for example `training.epochs`; `query.limit`.")
    message: str


class Problem(BaseModel):
    """A problem document (RFC 9457)."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra={
            "example": {
                "type": f"{TYPE_PREFIX}not-found",
                "title": "Resource not found",
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
    """Raised within the API for problems without an exception of their own in the shared packages."""

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


def invalid_field(field: str, message: str) -> ProblemError:
    """Return the problem for one invalid field."""
    return ProblemError(
        "invalid-request", message[:MAX_MESSAGE_LENGTH], errors=[field_error(field, message)]
    )


def field_error(field: str, message: str) -> FieldError:
    """Return an error of one field, its message cut to MAX_MESSAGE_LENGTH."""
    return FieldError(field=field, message=message[:MAX_MESSAGE_LENGTH])


def problem_response(problem: ProblemError, *, path: str) -> Response:
    """Return the problem document for a request to `path`."""
    status, title = PROBLEM_TYPES[problem.slug]
    body = {
        "type": TYPE_PREFIX + problem.slug,
        "title": title,
        "status": status,
        "detail": problem.detail[:MAX_MESSAGE_LENGTH],
        "instance": quote(path[:MAX_MESSAGE_LENGTH], safe="/:@!$&'()*+,;=~", errors="replace"),
        **problem.extensions,
    }
    # ASCII only: a message may quote client input that UTF-8 cannot encode.
    return Response(json.dumps(body), status, problem.headers, MEDIA_TYPE)
