"""The application: routes, problems, limits. Torch-free, so that it starts at once anywhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version

from fastapi import FastAPI

from services.api import errors
from services.api.auth.authentication import Door
from services.api.deps import Parts
from services.api.fast_route import DirectRoute, Shortcut
from services.api.limits.body import BodyLimit
from services.api.openapi import describe
from services.api.routes import (
    classify,
    datasets,
    diagnoses,
    health,
    jobs,
    models,
    plans,
    predict,
    runs,
)
from services.api.telemetry import InfoCollector, Observe, PlanErrorCollector

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(parts: Parts, *, lifespan: Lifespan | None = None) -> FastAPI:
    """Return the application over its parts; `lifespan` starts and stops what needs it."""
    app = FastAPI(
        title="Stillhouse",
        version=version("stillhouse"),
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_tags=_TAGS,
    )
    app.state.parts = parts
    for router in (
        predict.router,  # the first to be matched: the others are asked a thousand times less
        classify.router,
        datasets.router,
        plans.router,
        jobs.writes,
        jobs.reads,
        runs.router,
        diagnoses.router,
        models.router,
        health.router,
    ):
        app.include_router(router)
    errors.install(app)
    describe(app, models=[errors.Problem, datasets.DatasetForm])
    parts.metrics.registry.register(InfoCollector(parts.predictor))
    parts.metrics.registry.register(PlanErrorCollector(parts.store.plan_errors))
    app.add_middleware(Door)
    direct = [*predict.router.routes, *classify.router.routes]
    app.add_middleware(Shortcut, routes=[r for r in direct if isinstance(r, DirectRoute)])
    app.add_middleware(BodyLimit, settings=parts.settings)
    app.add_middleware(Observe, metrics=parts.metrics)  # the outermost: it sees every answer
    return app


_TAGS = [
    {"name": "datasets", "description": "Upload and validate labelled text."},
    {"name": "plans", "description": "Whether a job fits into memory."},
    {"name": "jobs", "description": "Train teachers, distil students, watch them."},
    {"name": "diagnoses", "description": "What an out-of-memory error really says."},
    {"name": "models", "description": "The registry, its gate, its promotions."},
    {"name": "predict", "description": "The promoted student answers."},
    {"name": "health", "description": "For orchestrators, Prometheus and people."},
]
