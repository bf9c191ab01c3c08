"""Translates exceptions into problem documents; the only module that maps errors to HTTP."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from services.api.problems import (
    MAX_FIELD_ERRORS,
    MAX_MESSAGE_LENGTH,
    RETRY_AFTER_SECONDS,
    FieldError,
    ProblemError,
    field_error,
    invalid_field,
    problem_response,
)
from services.api.serving.errors import (
    NoActiveModel,
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
    InUse,
    InvalidRequest,
    InvalidTransition,
    NotFound,
    QueueQuotaExceeded,
    StillhouseError,
    StorageQuotaExceeded,
    Unavailable,
)
from services.shared.memory import errors as memory
from services.shared.sandbox.errors import LimitExceeded, SandboxBusy, SandboxError

log = structlog.get_logger(__name__)

QUOTA_RETRY_SECONDS = 30

HANDLED_EXCEPTIONS: tuple[type[Exception], ...] = (
    ProblemError,
    StillhouseError,
    PredictionError,
    memory.InvalidInput,
    SandboxError,
    DatasetRejected,
    RequestValidationError,
    HTTPException,
)


def install_handlers(app: FastAPI) -> None:
    """Register a handler that answers each of HANDLED_EXCEPTIONS with a problem document."""
    for kind in HANDLED_EXCEPTIONS:
        app.add_exception_handler(kind, handle_exception)


async def handle_exception(request: Request, error: Exception) -> Response:
    """Return the problem document for one of HANDLED_EXCEPTIONS."""
    problem = to_problem(error)
    if problem.slug == "method-not-allowed":
        problem.headers["Allow"] = ", ".join(_allowed(request))
    return problem_response(problem, path=request.url.path)


def _allowed(request: Request) -> list[str]:
    # The router knows only the methods of the first route on a path; the OpenAPI document has them all.
    path = getattr(request.scope.get("route"), "path", None)
    operations = request.app.openapi()["paths"].get(path)
    if operations is None:  # the API description itself
        return ["GET", "HEAD"]
    return [method.upper() for method in operations]


def to_problem(error: Exception) -> ProblemError:
    """Translate an exception into a problem; unknown ones become `internal`."""
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
        return invalid_field(error.field, str(error))
    if isinstance(error, SandboxError):
        return _from_sandbox(error)
    return _from_stillhouse(error)


def _from_stillhouse(error: Exception) -> ProblemError:
    match error:
        case NotFound():
            return ProblemError("not-found", str(error))
        case InvalidRequest(field=str(field)):
            return invalid_field(field, str(error))
        case InvalidRequest():
            return ProblemError("invalid-request", str(error))
        case DoesNotFit():
            errors = [] if error.field is None else [field_error(error.field, str(error))]
            return ProblemError("does-not-fit", str(error), errors=errors, plan=error.plan)
        case InvalidTransition():
            return ProblemError("invalid-transition", str(error))
        case GateNotPassed():
            return ProblemError("gate-not-passed", str(error))
        case InUse(references=references):
            listed = [text[:MAX_MESSAGE_LENGTH] for text in references[:MAX_FIELD_ERRORS]]
            return ProblemError("in-use", str(error), references=listed)
        case QueueQuotaExceeded():
            retry = {"Retry-After": str(QUOTA_RETRY_SECONDS)}
            return ProblemError("quota-exceeded", str(error), headers=retry)
        case StorageQuotaExceeded():
            return ProblemError("storage-quota-exceeded", str(error))
        case Conflict():
            return ProblemError("conflict", str(error))
        case Unavailable():
            log.warning("unavailable", error=str(error))
            return ProblemError(
                "unavailable",
                "A service that this request needs is temporarily unreachable; try again later.",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
    return ProblemError("internal", "An unexpected error; see the server's log.")


def _from_sandbox(error: SandboxError) -> ProblemError:
    match error:
        case LimitExceeded():
            return ProblemError(
                "invalid-request",
                f"Calculating the answer to this request {error}; send a smaller model, recipe or log.",
            )
        case SandboxBusy():
            log.warning("calculations_busy", reason=str(error))
            return ProblemError(
                "unavailable",
                "This server calculates as many plans and diagnoses as it can; try again later.",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )
    log.error("calculation_failed", reason=str(error))
    return ProblemError("internal", "An unexpected error; see the server's log.")


def _from_prediction(error: PredictionError) -> ProblemError:
    match error:
        case NoActiveModel():
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
    return ProblemError("engine-failed", "The model failed to answer; see the server's log.")


def _from_dataset(error: DatasetRejected) -> ProblemError:
    faults = [
        {**fault.model_dump(), "message": fault.message[:MAX_MESSAGE_LENGTH]}
        for fault in error.faults
    ]
    detail = f"The upload has {error.total} error(s); the first: {error.faults[0]}"
    extensions: dict[str, Any] = {"faults": faults, "total_faults": error.total}
    if error.found:
        extensions |= {"found": error.found, "command": error.command}
    return ProblemError("invalid-dataset", detail, **extensions)


def _from_http(error: HTTPException) -> ProblemError:
    by_status = {
        400: ("malformed-request", "The body cannot be parsed as its media type."),
        404: ("not-found", "There is no route at this path; /docs lists the routes."),
        405: ("method-not-allowed", "The path does not support this method; see the Allow header."),
        413: ("too-large", str(error.detail)),
        415: ("unsupported-media-type", str(error.detail)),
    }
    slug, detail = by_status.get(error.status_code, ("internal", str(error.detail)))
    return ProblemError(slug, detail, headers=error.headers)


def _from_validation(error: RequestValidationError) -> ProblemError:
    found = list(error.errors())
    if any(item["type"] == "json_invalid" for item in found):
        return ProblemError(
            "malformed-request", f"The body is not valid JSON: {_json_error(found[0])}."
        )
    fields = [_validation_field_error(item, error.body) for item in found]
    unique = list({(item.field, item.message): item for item in fields}.values())
    kept = unique[:MAX_FIELD_ERRORS]
    detail = f"{kept[0].field}: {kept[0].message}"
    if len(unique) > 1:
        detail += f" (and {len(unique) - 1} more; see errors)"
    return ProblemError("invalid-request", detail, errors=kept)


def _json_error(item: Mapping[str, Any]) -> str:
    position = item["loc"][-1]
    return f"{item.get('ctx', {}).get('error', 'syntax error')} at character {position}"


def _validation_field_error(item: Mapping[str, Any], body: Any) -> FieldError:
    place, *path = item["loc"]
    names = [str(part) for part in path]
    if place == "body":
        names = _names_in_body(path, body, missing=item["type"] == "missing")
    else:
        names.insert(0, str(place))
    message = str(item["msg"]).removeprefix("Value error, ")[:MAX_MESSAGE_LENGTH]
    return FieldError(field=".".join(names) or "body", message=message)


def _names_in_body(path: Sequence[str | int], body: Any, *, missing: bool) -> list[str]:
    """Return the part of a validator's path that the client sent, without union tags and model names."""
    names: list[str] = []
    value = body
    for position, part in enumerate(path):
        if _contains(value, part):
            value = value[part]
        elif not (missing and position == len(path) - 1):
            continue
        names.append(str(part)[:MAX_MESSAGE_LENGTH])
    return names


def _contains(value: Any, part: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, Mapping) and part in value
