"""The live list of jobs: one stream for all rows of a page."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from services.api.auth.callers import requires
from services.api.auth.keys import Scope
from services.api.deps import AppContext, CallerDep, ContextDep, StoreDep
from services.api.job_list_streams import MAX_CHANGES, JobListFeed
from services.api.openapi import problems
from services.api.routes.runs import LAST_SEQ, MOST_WAIT_SECONDS, wants_json
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.views import JobChanges

router = APIRouter(
    tags=["jobs"],
    dependencies=[Depends(requires(Scope.READ))],
    responses=problems(401, 422, 429, 500, 503),
)

_EVENT_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "For Last-Event-ID."},
        "event": {"enum": ["ready", "job", "reload"]},
        "data": {"type": "string", "description": "JSON: of `job`, a JobSummary."},
    },
}


@router.get(
    "/jobs/events",
    operation_id="watch_jobs",
    response_model=JobChanges,
    responses={
        200: {
            "description": "Changes until the client goes. `Accept: application/json` returns a list.",
            "content": {"text/event-stream": {"schema": _EVENT_SCHEMA}},
        }
    },
)
async def watch_jobs(
    context: ContextDep,
    store: StoreDep,
    caller: CallerDep,
    request: Request,
    last_event_id: Annotated[
        int | None, Header(ge=0, le=LAST_SEQ, description="Begin with what changed after this.")
    ] = None,
) -> Any:
    """Stream each job of the caller's project that changes: `ready` first, then `job`, as in the list.

    `reload` says that more changed than the stream can tell: read the list again.
    """
    if wants_json(request):
        return await run_in_threadpool(
            store.job_changes, after_seq=last_event_id, limit=MAX_CHANGES
        )
    context.stream_limiter.check(caller.id)
    return EventSourceResponse(
        _events(store, context=context, caller=caller.id, last_event_id=last_event_id),
        ping=context.settings.event_ping_seconds,
    )


async def _events(
    store: Store, *, context: AppContext, caller: str, last_event_id: int | None
) -> AsyncIterator[ServerSentEvent]:
    clock = asyncio.get_running_loop().time
    ends_at = clock() + (context.settings.event_stream_seconds or math.inf)
    with context.stream_limiter.stream(caller):
        async with context.job_list_streams.subscribe(store) as feed:
            seen = feed.version
            yield ServerSentEvent("{}", event="ready", id=_id(last_event_id))
            if last_event_id is not None:
                for event in await _missed(store, last_event_id):
                    yield event
            while clock() < ends_at:
                changed, version = feed.changed, feed.version
                for event in _news(feed, since=seen):
                    yield event
                seen = version
                with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                    await asyncio.wait_for(
                        changed.wait(), min(ends_at - clock(), MOST_WAIT_SECONDS)
                    )


def _news(feed: JobListFeed, *, since: int) -> list[ServerSentEvent]:
    jobs = feed.since(since)
    if jobs is None:
        return [ServerSentEvent("{}", event="reload", id=_id(feed.last_seq))]
    return [
        ServerSentEvent(job.model_dump_json(), event="job", id=_id(feed.last_seq)) for job in jobs
    ]


async def _missed(store: Store, last_event_id: int) -> list[ServerSentEvent]:
    """Return what changed while a client was away."""
    try:
        changes = await run_in_threadpool(
            store.job_changes, after_seq=last_event_id, limit=MAX_CHANGES
        )
    except Unavailable:
        return [ServerSentEvent("{}", event="reload")]
    last = _id(changes.last_seq)
    if not changes.is_complete:
        return [ServerSentEvent("{}", event="reload", id=last)]
    return [
        ServerSentEvent(job.model_dump_json(), event="job", id=last)
        for job in reversed(changes.items)
    ]


def _id(seq: int | None) -> str | None:
    return None if seq is None else str(seq)
