"""Assembles the FastAPI application: routes, error handlers and middleware. Imports no torch, so it starts fast."""

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
from services.api.openapi import install_openapi
from services.api.routes import (
    audit,
    classify,
    console,
    datasets,
    diagnoses,
    health,
    job_list,
    jobs,
    maintenance,
    model_files,
    models,
    node,
    plans,
    predict,
    runs,
    session,
)
from services.api.telemetry import (
    ModelInfoCollector,
    PlanErrorCollector,
    StorageCollector,
    TelemetryMiddleware,
)
from services.api.writes import AuditMiddleware, MaintenanceMiddleware
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.lifecycle.report import storage_report

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


def create_app(context: AppContext, *, lifespan: Lifespan | None = None) -> FastAPI:
    """Return the application for `context`; `lifespan` starts and stops its background work."""
    app = FastAPI(
        title="Stillhouse",
        version=version("stillhouse"),
        lifespan=lifespan,
        redirect_slashes=False,
        openapi_tags=_TAGS,
    )
    app.state.context = context
    for router in (
        predict.router,  # matched first: it receives most of the traffic
        classify.router,
        datasets.router,
        plans.router,
        job_list.router,  # before `/jobs/{job_id}`
        jobs.writes,
        jobs.reads,
        runs.router,
        diagnoses.router,
        models.router,
        model_files.router,
        audit.router,
        maintenance.router,
        node.router,
        session.router,
        health.router,
        console.router,
    ):
        app.include_router(router)
    errors.install_handlers(app)
    install_openapi(app, models=[problems.Problem, datasets.DatasetForm])
    context.metrics.registry.register(ModelInfoCollector(context.predictor))
    context.metrics.registry.register(PlanErrorCollector(context.store.plan_errors))
    context.metrics.registry.register(
        StorageCollector(lambda: storage_report(LifecycleStore(context.store)))
    )
    app.add_middleware(AuditMiddleware)
    app.add_middleware(MaintenanceMiddleware)
    app.add_middleware(AuthenticationMiddleware)
    prediction_routes = [*predict.router.routes, *classify.router.routes]
    app.add_middleware(
        FastRouteMiddleware, routes=[r for r in prediction_routes if isinstance(r, FastRoute)]
    )
    app.add_middleware(BodyLimitMiddleware, settings=context.settings)
    app.add_middleware(
        TelemetryMiddleware, metrics=context.metrics
    )  # outermost: it sees every response
    return app


_TAGS = [
    {"name": "datasets", "description": "Upload and validate labelled text."},
    {"name": "plans", "description": "Predict whether a job fits in memory."},
    {"name": "jobs", "description": "Fine-tune teachers, distil students, follow their progress."},
    {"name": "diagnoses", "description": "Explain out-of-memory errors."},
    {"name": "models", "description": "Model registry, evaluation gate and promotions."},
    {"name": "predict", "description": "Classify texts with the promoted student."},
    {"name": "operations", "description": "Workers, disk, audit log and maintenance mode."},
    {"name": "session", "description": "Sign in to the console."},
    {"name": "health", "description": "Probes, status and metrics."},
]
