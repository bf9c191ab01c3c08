"""What both prediction routes share: alias and head selection, cancellation, response headers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Iterable, Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from services.api.auth.callers import authenticate
from services.api.deps import AppContext, Student
from services.api.problems import FieldError, ProblemError, invalid_field
from services.api.serving.errors import NoActiveModel, TextTooLong, UnusableText
from services.api.serving.prediction import Prediction
from services.shared.datasets.text import Text, character_fault, strings_of
from services.shared.jobs.db.model_queries import DEFAULT_ALIAS
from services.shared.jobs.projects import qualified_alias

T = TypeVar("T")

WATCH_AFTER_SECONDS = 0.05  # delay before a request's connection is watched for a disconnect

RESPONSE_HEADERS = {
    "X-Model-Version": {
        "schema": {"type": "string"},
        "description": "Version of the model that answered.",
    },
    "Server-Timing": {"schema": {"type": "string"}, "description": "Milliseconds per stage."},
}


class Usage(BaseModel):
    """Number of tokens processed."""

    prompt_tokens: int
    total_tokens: int


async def predict_texts(
    texts: Sequence[Text],
    *,
    request: Request,
    context: AppContext,
    alias: str,
    field: str,
    truncate: bool,
    heads: list[str] | None = None,
) -> Sequence[Prediction]:
    """Return one prediction per text from the student of `alias` in the caller's project, with at least `heads`.

    `field` is the request field that holds the texts. Raises ProblemError, PredictionError, and
    ClientDisconnect if the client disconnects first.
    """
    limit = context.settings.predict_most_texts
    if len(texts) > limit:
        raise ProblemError("too-large", f"{len(texts)} texts; one request may have {limit}.")
    student = await active_student(context, alias, request=request)
    qualified = qualified_alias(authenticate(request).project, alias)
    select_heads((head.name for head in student.heads), heads)
    try:
        _check_characters(texts)
        predictions = await _while_connected(
            request, context.predictor.predict(texts, truncate=truncate, alias=qualified)
        )
    except (TextTooLong, UnusableText) as error:
        raise _text_problem(error, field=field) from error
    # Another student may have been swapped in between the two calls.
    select_heads(predictions[0].scores, heads)
    return predictions


def _check_characters(texts: Sequence[Text]) -> None:
    """Raise UnusableText for the first text that a dataset may not have either."""
    for index, text in enumerate(texts):
        for part in strings_of(text):
            if fault := character_fault(part):
                raise UnusableText(index, fault)


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, but cancel it if the client disconnects, to free compute for other requests.

    The connection is watched only after WATCH_AFTER_SECONDS: most requests finish sooner, and a second
    task for each of them would cost more than the rest of the route.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a request is handled in a task"
    watcher = _DisconnectWatcher(request, task)
    timer = loop.call_later(WATCH_AFTER_SECONDS, watcher.start)
    try:
        return await work
    except asyncio.CancelledError:
        if not watcher.disconnected:
            raise  # the server is shutting down
        raise ClientDisconnect from None
    finally:
        timer.cancel()
        watcher.stop()


class _DisconnectWatcher:
    """Cancels a task once the client of its request disconnects."""

    def __init__(self, request: Request, task: asyncio.Task[Any]) -> None:
        self._request = request
        self._task = task
        self._watch_task: asyncio.Task[None] | None = None
        self.disconnected = False

    def start(self) -> None:
        self._watch_task = asyncio.ensure_future(self._watch())

    def stop(self) -> None:
        if self._watch_task is not None:
            self._watch_task.cancel()

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        self._task.cancel()


def _text_problem(error: TextTooLong | UnusableText, *, field: str) -> ProblemError:
    slug = "text-too-long" if isinstance(error, TextTooLong) else "unusable-text"
    faulty = FieldError(field=f"{field}.{error.index}", message=str(error))
    return ProblemError(slug, str(error), errors=[faulty])


async def active_student(context: AppContext, alias: str, *, request: Request) -> Student:
    """Return the student of `alias` in the caller's project.

    Raises NoActiveModel, and ProblemError for an unknown alias.
    """
    caller = authenticate(request)
    student = context.predictor.active(qualified_alias(caller.project, alias))
    if student is not None:
        return student
    store = context.store.within(caller.access)
    if alias != DEFAULT_ALIAS and await run_in_threadpool(store.active, alias) is None:
        raise ProblemError("not-found", f"No model has ever been promoted to {alias!r}.")
    raise NoActiveModel(alias)


def select_heads(available: Iterable[str], requested: list[str] | None) -> list[str]:
    """Return the requested heads, or all. Raises ProblemError for one that does not exist."""
    names = list(available)
    for index, name in enumerate(requested or ()):
        if name not in names:
            raise invalid_field(
                f"heads.{index}", f"The model has no head {name[:80]!r}; it has {', '.join(names)}."
            )
    return names if requested is None else requested


def count_usage(predictions: Sequence[Prediction]) -> dict[str, int]:
    """Return the token usage, in the shape of both routes."""
    tokens = sum(prediction.tokens for prediction in predictions)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def prediction_response(content: Any, predictions: Sequence[Prediction]) -> Response:
    """Return a JSON response whose headers carry the model version and the slowest text's stage times."""
    slowest = [max(p.timing[stage] for p in predictions) for stage in range(3)]
    stages = zip(("tokenise", "queue", "compute"), slowest, strict=True)
    headers = {
        "X-Model-Version": predictions[0].version,
        "Server-Timing": ", ".join(f"{name};dur={1000 * s:.2f}" for name, s in stages),
    }
    return Response(_encode(content), headers=headers, media_type="application/json")


# As Starlette's JSONResponse, which creates a new encoder for every response.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
