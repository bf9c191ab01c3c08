"""The output of a job's runs: events as they happen, the end of the log, memory, and metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from pydantic import BaseModel
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response

from services.api.auth.callers import requires
from services.api.auth.keys import Scope
from services.api.deps import AppContext, CallerDep, ContextDep, JobId, StoreDep
from services.api.downsampling import RankSeries, Series, downsample, rank_memory
from services.api.event_streams import JobFeed
from services.api.openapi import problems
from services.shared.files.tail import read_last_lines
from services.shared.jobs.db.store import Store
from services.shared.jobs.documents import Evaluation
from services.shared.jobs.errors import NotFound, Unavailable
from services.shared.jobs.label_quality import LabelQuality
from services.shared.jobs.planning.plan_vs_measured import PlannedPhases
from services.shared.jobs.run_directory import ProgressRecord, RunDirectory, read_records
from services.shared.jobs.views import EventView, JobView

router = APIRouter(
    tags=["jobs"],
    dependencies=[Depends(requires(Scope.READ))],
    responses=problems(401, 404, 422, 429, 500, 503),
)

MOST_WAIT_SECONDS = 30.0  # for a change; a stream then looks again by itself
MOST_EVENTS = 500  # of the plain list; Last-Event-ID brings the next
LAST_SEQ = 2**63 - 1

_EVENT_SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "description": "Of an event; progress has none."},
        "event": {"enum": ["state", "phase", "evaluation", "progress"]},
        "data": {"type": "string", "description": "JSON."},
    },
}

Attempt = Annotated[
    int | None, Query(ge=1, le=1_000_000, description="The last attempt if left out.")
]
Points = Annotated[int, Query(ge=2, le=5000, description="Most points of a series.")]


@router.get(
    "/jobs/{job_id}/events",
    operation_id="watch_job",
    response_model=list[EventView],
    responses={
        200: {
            "description": "Events until the job ends. `Accept: application/json` returns a list.",
            "content": {"text/event-stream": {"schema": _EVENT_SCHEMA}},
        }
    },
)
async def watch_job(
    job_id: JobId,
    context: ContextDep,
    store: StoreDep,
    caller: CallerDep,
    request: Request,
    last_event_id: Annotated[
        int, Header(ge=0, le=LAST_SEQ, description="Go on after this event.")
    ] = 0,
) -> Any:
    """Stream a job's events: `state`, `phase`, `evaluation` (with ids) and `progress` (without)."""
    await run_in_threadpool(store.job, job_id)  # an unknown job is a 404, not a stream
    if wants_json(request):
        return await run_in_threadpool(
            store.events, job_id, after_seq=last_event_id, limit=MOST_EVENTS
        )
    context.stream_limiter.check(caller.id)
    return EventSourceResponse(
        _events(job_id, context=context, after_seq=last_event_id, caller=caller.id),
        ping=context.settings.event_ping_seconds,
    )


def wants_json(request: Request) -> bool:
    """Return whether a client asks for a list instead of a stream."""
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and "text/event-stream" not in accepted


async def _events(
    job_id: str, *, context: AppContext, after_seq: int, caller: str
) -> AsyncIterator[ServerSentEvent]:
    with context.stream_limiter.stream(caller):
        async with context.event_streams.subscribe(job_id, after_seq=after_seq) as feed:
            async for event in _feed_events(job_id, feed, context=context, after_seq=after_seq):
                yield event


async def _feed_events(
    job_id: str, feed: JobFeed, *, context: AppContext, after_seq: int
) -> AsyncIterator[ServerSentEvent]:
    clock = asyncio.get_running_loop().time
    ends_at = clock() + (context.settings.event_stream_seconds or math.inf)
    progress = None
    while clock() < ends_at:  # a client reconnects by itself and names the last id it saw
        changed, job, has_ended = feed.changed, feed.job, feed.has_ended
        try:
            events = await _events_after(job_id, feed, context=context, after_seq=after_seq)
        except Unavailable:
            await asyncio.sleep(context.settings.event_poll_seconds)
            continue
        for event in events:
            after_seq = event.seq
            yield ServerSentEvent(event.model_dump_json(), event=str(event.type), id=str(event.seq))
        if events:
            continue
        if has_ended:
            return
        if job is not None and job.progress is not None and job.progress != progress:
            progress = job.progress
            yield ServerSentEvent(_progress_json(job), event="progress")
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(changed.wait(), min(ends_at - clock(), MOST_WAIT_SECONDS))


async def _events_after(
    job_id: str, feed: JobFeed, *, context: AppContext, after_seq: int
) -> list[EventView]:
    kept = feed.after(after_seq)
    if kept is not None:
        return kept
    return await context.event_streams.read(job_id, after_seq=after_seq)


def _progress_json(job: JobView) -> str:
    return job.model_dump_json(include={"id", "attempt", "phase", "progress"})


@router.get(
    "/jobs/{job_id}/logs",
    operation_id="get_job_log",
    response_class=PlainTextResponse,
)
def get_job_log(
    job_id: JobId,
    store: StoreDep,
    attempt: Attempt = None,
    tail_bytes: Annotated[int, Query(ge=1, le=1024 * 1024)] = 64 * 1024,
) -> Response:
    """Return the end of what torchrun and the ranks have printed, in whole lines."""
    run, _ = _run(store, job_id, attempt)
    return PlainTextResponse(read_last_lines(run.log, max_bytes=tail_bytes) if run else "")


class JobMemory(BaseModel):
    """Planned next to measured, for each rank of an attempt, in bytes."""

    job_id: str
    attempt: int
    planned_peak_bytes: int | None
    budget_bytes: int | None
    ranks: list[RankSeries]


@router.get("/jobs/{job_id}/memory", operation_id="get_job_memory")
def get_job_memory(
    job_id: JobId, store: StoreDep, attempt: Attempt = None, points: Points = 500
) -> JobMemory:
    """Show each rank's memory over time, and its peak in each phase next to the planned one."""
    run, job = _run(store, job_id, attempt)
    number = attempt or job.attempt
    plans = {tried.number: tried.plan for tried in job.attempts}
    plan = plans.get(number, job.plan)  # each attempt's own: a remedy changes the plan
    planned = PlannedPhases.of(plan)
    ranks = (
        [rank_memory(run, rank, planned=planned, points=points) for rank in run.ranks()]
        if run
        else []
    )
    return JobMemory(
        job_id=job_id,
        attempt=number,
        planned_peak_bytes=plan.get("peak_bytes") if plan else None,
        budget_bytes=plan.get("budget_bytes") if plan else None,
        ranks=ranks,
    )


class JobMetrics(BaseModel):
    """Evaluations and the training curve of an attempt."""

    job_id: str
    attempt: int
    metrics: Evaluation | None
    evaluations: list[ProgressRecord]
    series: Series[ProgressRecord]


@router.get("/jobs/{job_id}/metrics", operation_id="get_job_metrics")
def get_job_metrics(
    job_id: JobId, store: StoreDep, attempt: Attempt = None, points: Points = 500
) -> JobMetrics:
    """Show loss, learning rate and speed over time, and every evaluation."""
    run, job = _run(store, job_id, attempt)
    evaluations: list[ProgressRecord] = []

    def records() -> Iterator[ProgressRecord]:
        for _, record in read_records(run.progress, ProgressRecord) if run else ():
            if record.evaluation is not None:
                evaluations.append(record)
            else:
                yield record

    series = downsample(records(), points=points)
    return JobMetrics(
        job_id=job_id,
        attempt=attempt or job.attempt,
        metrics=job.metrics,
        evaluations=evaluations,
        series=series,
    )


class JobLabelQuality(LabelQuality):
    """What the labels of a teacher job look like after training."""

    job_id: str
    attempt: int


@router.get("/jobs/{job_id}/label-quality", operation_id="get_job_label_quality")
def get_job_label_quality(
    job_id: JobId, store: StoreDep, attempt: Attempt = None
) -> JobLabelQuality:
    """List likely wrong labels, duplicates across splits and contradictions, once a teacher is trained."""
    run, job = _run(store, job_id, attempt)
    try:
        found = json.loads(run.label_quality.read_bytes()) if run else None
    except FileNotFoundError:
        found = None
    if found is None:
        raise NotFound("label quality of a trained teacher in", job_id)
    return JobLabelQuality(**found, job_id=job_id, attempt=attempt or job.attempt)


def _run(store: Store, job_id: str, attempt: int | None) -> tuple[RunDirectory | None, JobView]:
    """Return the run directory of an attempt, or None before the first."""
    job = store.job(job_id)
    number = attempt or job.attempt
    if number > job.attempt:
        raise NotFound("attempt", f"{job_id}/{number}")
    return (RunDirectory(store.settings.run_dir(job_id, number)) if number else None), job
