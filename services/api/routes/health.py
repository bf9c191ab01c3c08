"""Whether the process lives, whether its parts answer, what serves, and the metrics."""

from __future__ import annotations

import time
from typing import Literal

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.responses import Response

from services.api.auth.keys import limit_by_address, requires
from services.api.deps import AppContext, ContextDep
from services.api.openapi import problems
from services.api.problems import RETRY_AFTER_SECONDS, ProblemError
from services.shared.jobs.errors import Unavailable

router = APIRouter(tags=["health"], responses=problems(500))


class Alive(BaseModel):
    """The process answers."""

    status: Literal["ok"] = "ok"


class PartStatus(BaseModel):
    """Whether one part answers, and how fast."""

    ok: bool
    milliseconds: float


class Ready(BaseModel):
    """Every part answers."""

    status: Literal["ok", "degraded"]
    parts: dict[str, PartStatus]


class ServedModel(BaseModel):
    """A model that answers /predict now."""

    name: str
    version: str
    heads: list[str]
    max_length: int


class Health(Ready):
    """AppContext and served models."""

    models: dict[str, ServedModel]


@router.get("/livez", operation_id="livez")
async def livez() -> Alive:
    """Say that the process answers; looks at nothing else."""
    return Alive()


@router.get(
    "/readyz",
    operation_id="readyz",
    dependencies=[Depends(limit_by_address)],
    responses=problems(429, 503),
)
def readyz(context: ContextDep) -> Ready:
    """Say whether database, broker and data directory answer; 503 names those that do not."""
    found = _probe(context)
    silent = [name for name, status in found.items() if not status.ok]
    if silent:
        raise ProblemError(
            "unavailable",
            f"These parts do not answer: {', '.join(silent)}.",
            headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            parts={name: status.model_dump() for name, status in found.items()},
        )
    return Ready(status="ok", parts=found)


@router.get(
    "/health",
    operation_id="health",
    dependencies=[Depends(limit_by_address)],
    responses=problems(429),
)
def health(context: ContextDep) -> Health:
    """Show parts and served models; always 200, for people and dashboards."""
    found = _probe(context)
    served = {alias: context.predictor.active(alias) for alias in context.predictor.aliases()}
    return Health(
        status="ok" if all(status.ok for status in found.values()) else "degraded",
        parts=found,
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
    dependencies=[Depends(requires(None))],
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        **problems(401, 429),
    },
)
def metrics(context: ContextDep) -> Response:
    """Return what Prometheus scrapes."""
    return Response(context.metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _probe(context: AppContext) -> dict[str, PartStatus]:
    found = {}
    for name, probe in context.probes.items():
        started = time.perf_counter()
        try:
            probe()
            ok = True
        except (Unavailable, OSError):
            ok = False
        elapsed = 1000 * (time.perf_counter() - started)
        found[name] = PartStatus(ok=ok, milliseconds=round(elapsed, 3))
    return found
