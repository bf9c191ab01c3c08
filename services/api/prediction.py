"""Asks the predictor on behalf of a request: which alias, which heads, and for whom no more."""

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

from services.api.deps import AppContext, Student
from services.api.problems import FieldError, ProblemError, invalid_field
from services.api.serving.errors import NoActiveModel, TextTooLong, UnusableText
from services.api.serving.prediction import Prediction
from services.shared.jobs.db.model_queries import DEFAULT_ALIAS

T = TypeVar("T")

# No text is written with them: they come from broken exports and from terminals. What ends lines and pages
# stays, as does what sets tabs.
_CONTROL_CHARACTERS = bytes(set(range(32)) - set(b"\t\n\v\f\r") | {127})

WATCH_AFTER_SECONDS = 0.05  # how late an answer must be before its client's connection is watched

RESPONSE_HEADERS = {
    "X-Model-Version": {"schema": {"type": "string"}, "description": "The model that answered."},
    "Server-Timing": {"schema": {"type": "string"}, "description": "Milliseconds a stage."},
}


class Usage(BaseModel):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


async def predict_texts(
    texts: list[str],
    *,
    request: Request,
    context: AppContext,
    alias: str,
    field: str,
    truncate: bool,
    heads: list[str] | None = None,
) -> Sequence[Prediction]:
    """Return one prediction a text, by the student of `alias`, with at least `heads`.

    `field` is the request's name for its texts. Raises ProblemError, PredictionError, and
    ClientDisconnect when nobody waits for the answer any more.
    """
    most = context.settings.predict_most_texts
    if len(texts) > most:
        raise ProblemError("too-large", f"{len(texts)} texts; one request may have {most}.")
    student = await active_student(context, alias)
    select_heads((head.name for head in student.heads), heads)
    try:
        _check_characters(texts)
        predictions = await _while_connected(
            request, context.predictor.predict(texts, truncate=truncate, alias=alias)
        )
    except (TextTooLong, UnusableText) as error:
        raise _refused(error, field=field) from error
    # A swap between the two calls may have brought another student.
    select_heads(predictions[0].scores, heads)
    return predictions


def _check_characters(texts: Sequence[str]) -> None:
    """Raise UnusableText for the first text with a control character."""
    for index, text in enumerate(texts):
        raw = text.encode()  # which is how a text of 5 MB is looked through in 9 ms
        cleaned = raw.translate(None, _CONTROL_CHARACTERS)
        if len(cleaned) != len(raw):
            found = next(character for character in raw if character in _CONTROL_CHARACTERS)
            raise UnusableText(index, f"contains the control character U+{found:04X}")


async def _while_connected(request: Request, work: Awaitable[T]) -> T:
    """Wait for `work`, and drop it when its client has gone: others wait for the same lanes.

    Nobody looks at the connection before the answer is late; most are there sooner, and a second
    task for each of them would cost more than the rest of the route.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "a request is answered in a task"
    watch = _Watch(request, task)
    late = loop.call_later(WATCH_AFTER_SECONDS, watch.begin)
    try:
        return await work
    except asyncio.CancelledError:
        if not watch.has_left:
            raise  # the server stops
        raise ClientDisconnect from None
    finally:
        late.cancel()
        watch.end()


class _Watch:
    """Cancels a task once the client of its request has left."""

    def __init__(self, request: Request, task: asyncio.Task[Any]) -> None:
        self._request = request
        self._task = task
        self._watching: asyncio.Task[None] | None = None
        self.has_left = False

    def begin(self) -> None:
        self._watching = asyncio.ensure_future(self._watch())

    def end(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        self._task.cancel()


def _refused(error: TextTooLong | UnusableText, *, field: str) -> ProblemError:
    slug = "text-too-long" if isinstance(error, TextTooLong) else "unusable-text"
    place = FieldError(field=f"{field}.{error.index}", message=str(error))
    return ProblemError(slug, str(error), errors=[place])


async def active_student(context: AppContext, alias: str) -> Student:
    """Return the student of `alias`. Raises NoActiveModel, and ProblemError for an unknown alias."""
    student = context.predictor.active(alias)
    if student is not None:
        return student
    if alias != DEFAULT_ALIAS and await run_in_threadpool(context.store.active, alias) is None:
        raise ProblemError("not-found", f"No model has ever been promoted to {alias!r}.")
    raise NoActiveModel(alias)


def select_heads(available: Iterable[str], wanted: list[str] | None) -> list[str]:
    """Return the wanted heads, or all. Raises ProblemError naming one that is not there."""
    names = list(available)
    for index, name in enumerate(wanted or ()):
        if name not in names:
            raise invalid_field(
                f"heads.{index}", f"The model has no head {name[:80]!r}; it has {', '.join(names)}."
            )
    return names if wanted is None else wanted


def count_usage(predictions: Sequence[Prediction]) -> dict[str, int]:
    """Return the tokens read, as both shapes count them."""
    tokens = sum(prediction.tokens for prediction in predictions)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def prediction_response(content: Any, predictions: Sequence[Prediction]) -> Response:
    """Return the answer with the model's version and the slowest text's stages in its headers."""
    slowest = [max(p.timing[stage] for p in predictions) for stage in range(3)]
    stages = zip(("tokenise", "queue", "compute"), slowest, strict=True)
    headers = {
        "X-Model-Version": predictions[0].version,
        "Server-Timing": ", ".join(f"{name};dur={1000 * s:.2f}" for name, s in stages),
    }
    return Response(_encode(content), headers=headers, media_type="application/json")


# As starlette's JSONResponse, which makes an encoder anew for every answer.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode
