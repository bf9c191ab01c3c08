"""Liveness, readiness, health and metrics."""

from __future__ import annotations

import time
from typing import Literal

from fastapi import APIRouter, Depends, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response

from services.api.auth.callers import identify, limit_by_address, requires
from services.api.auth.keys import Scope
from services.api.deps import AppContext, ContextDep
from services.api.openapi import problems
from services.api.problems import RETRY_AFTER_SECONDS, ProblemError
from services.shared.jobs.errors import OldSchema, Unavailable
from services.shared.jobs.lifecycle.epoch import EpochMismatch
from services.shared.jobs.projects import Access, alias_seen_by

router = APIRouter(tags=["health"], responses=problems(500))


class Alive(BaseModel):
    """The process is alive."""

    status: Literal["ok"] = "ok"


class DependencyStatus(BaseModel):
    """Whether one dependency responds, and how fast."""

    ok: bool
    milliseconds: float
    problem: str | None = None  # where more is known than that it does not respond


class Ready(BaseModel):
    """The status of every dependency."""

    status: Literal["ok", "degraded"]
    parts: dict[str, DependencyStatus]
    warnings: list[str] = []


class ServedModel(BaseModel):
    """A model that currently serves /predict."""

    name: str
    version: str
    heads: list[str]
    max_length: int


class Health(Ready):
    """Dependencies and served models."""

    models: dict[str, ServedModel]


@router.get("/livez", operation_id="livez")
async def livez() -> Alive:
    """Report that the process is alive; checks no dependency."""
    return Alive()


@router.get(
    "/readyz",
    operation_id="readyz",
    dependencies=[Depends(limit_by_address)],
    responses=problems(429, 503),
)
def readyz(context: ContextDep) -> Ready:
    """Report whether database, broker and data directory respond; a 503 names those that do not."""
    found = _probe_dependencies(context)
    failed = [name for name, status in found.items() if not status.ok]
    if failed:
        raise ProblemError(
            "unavailable",
            f"These dependencies do not respond: {', '.join(failed)}."
            + "".join(f" {found[name].problem}" for name in failed if found[name].problem),
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            parts={name: status.model_dump() for name, status in found.items()},
        )
    return Ready(status="ok", parts=found, warnings=_warnings(context))


@router.get(
    "/health",
    operation_id="health",
    dependencies=[Depends(limit_by_address)],
    responses=problems(429),
)
def health(request: Request, context: ContextDep) -> Health:
    """Show dependencies and served models; always 200, for people and dashboards.

    Without a key, the models are those of the project `default`; with one, those that it may see.
    """
    found = _probe_dependencies(context)
    caller = identify(request)
    access = Access(sees_all=False) if caller is None else caller.access
    served = {
        shown: context.predictor.active(alias)
        for alias in context.predictor.aliases()
        if (shown := alias_seen_by(access, alias)) is not None
    }
    return Health(
        status="ok" if all(status.ok for status in found.values()) else "degraded",
        parts=found,
        warnings=_warnings(context),
        models={
            alias: ServedModel(
                name=student.name,
                version=student.version,
                heads=[head.name for head in student.heads],
                max_length=student.max_length,
            )
            for alias, student in served.items()
            if student is not None
        },
    )


@router.get(
    "/metrics",
    operation_id="metrics",
    response_class=Response,
    dependencies=[Depends(requires(Scope.METRICS))],
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **problems(401, 429),
    },
)
def metrics(context: ContextDep) -> Response:
    """Return the metrics in Prometheus's text format."""
    return Response(context.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _warnings(context: AppContext) -> list[str]:
    return [] if context.keys.warning is None else [context.keys.warning]


def _probe_dependencies(context: AppContext) -> dict[str, DependencyStatus]:
    found = {}
    for name, probe in context.probes.items():
        started = time.perf_counter()
        ok, problem = True, None
        try:
            probe()
        except (EpochMismatch, OldSchema) as error:
            ok, problem = False, str(error)
        except (Unavailable, OSError):
            ok = False
        elapsed = 1000 * (time.perf_counter() - started)
        found[name] = DependencyStatus(ok=ok, milliseconds=round(elapsed, 3), problem=problem)
    return found
