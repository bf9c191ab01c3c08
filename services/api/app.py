"""The application: routes, problems, limits. Torch-free, so that it starts at once anywhere."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib.metadata import version

from fastapi import FastAPI

from services.api import errors, problems
from services.api.auth.authentication import AuthenticationMiddleware
from services.api.deps import AppContext
from services.api.fast_route import FastRoute, FastRouteMiddleware
from services.api.limits.body import BodyLimitMiddleware
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
from services.api.telemetry import ModelInfoCollector, PlanErrorCollector, TelemetryMiddleware

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(context: AppContext, *, lifespan: Lifespan | None = None) -> FastAPI:
    """Return the application over its parts; `lifespan` starts and stops what needs it."""
    app = FastAPI(
        title="Stillhouse",
        version=version("stillhouse"),
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_tags=_TAGS,
    )
    app.state.context = context
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
    describe(app, models=[problems.Problem, datasets.DatasetForm])
    context.metrics.registry.register(ModelInfoCollector(context.predictor))
    context.metrics.registry.register(PlanErrorCollector(context.store.plan_errors))
    app.add_middleware(AuthenticationMiddleware)
    direct = [*predict.router.routes, *classify.router.routes]
    app.add_middleware(FastRouteMiddleware, routes=[r for r in direct if isinstance(r, FastRoute)])
    app.add_middleware(BodyLimitMiddleware, settings=context.settings)
    app.add_middleware(
        TelemetryMiddleware, metrics=context.metrics
    )  # the outermost: it sees every answer
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
