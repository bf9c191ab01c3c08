"""Entry point of the API server: `python -m services.api.main`."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import structlog
import uvicorn
from fastapi import FastAPI
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from services.api.admission import Admission
from services.api.app import create_app
from services.api.auth.keys import load_keys
from services.api.auth.keys_watcher import KeysWatcher
from services.api.deps import AppContext
from services.api.job_sender import JobSender
from services.api.limits.rate_limit import create_rate_limiters
from services.api.limits.spool import remove_abandoned
from services.api.limits.uploads import UploadLimiter
from services.api.logs import configure_logs
from services.api.promotions import PromotionFeed
from services.api.sandboxes import create_sandboxes
from services.api.server import server_config
from services.api.serving.predictor import Predictor
from services.api.serving.settings import ServingSettings
from services.api.settings import ApiSettings
from services.api.telemetry import Metrics
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.store import open_store
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.lifecycle.epoch import check_epoch
from services.shared.jobs.queue import depth, make_celery, send

log = structlog.get_logger(__name__)

BROKER_SECONDS = 3.0  # for an answer of the broker; the API only sends


def main() -> None:
    """Serve until SIGINT or SIGTERM; exit with status 1 and a one-line message if startup fails."""
    configure_logs()
    try:
        settings = ApiSettings()
        app = create(settings)
        # Spool uploads in the data directory: a container's /tmp may be a small tmpfs.
        tempfile.tempdir = str(settings.uploads_dir)
    except ValidationError as error:
        sys.exit("\n".join(f"{_variable(error, e)}: {e['msg']}" for e in error.errors()))
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    signal.signal(signal.SIGHUP, lambda *_: app.state.keys_watcher.request())
    uvicorn.Server(server_config(app, settings)).run()


def create(settings: ApiSettings | None = None) -> FastAPI:
    """Return the application with its production context (`uvicorn --factory services.api.main:create`).

    Raises ValueError for settings that would allow unauthenticated remote access, OSError if a data
    directory cannot be created.
    """
    settings = settings or ApiSettings()
    keys = load_keys(settings)
    _make_directories(settings)
    metrics = Metrics()
    store = open_store(settings)
    celery = make_celery(settings, socket_seconds=BROKER_SECONDS)
    sender = JobSender(lambda job_id, kind: send(celery, job_id, kind))
    feed = PromotionFeed(store, datasets_dir=settings.datasets_dir)
    sandboxes = create_sandboxes(settings)
    predictor = Predictor(
        promotions=feed,
        registry=metrics.registry,
        listener=feed,
        load_lock=settings.data_dir / f".loading.{socket.gethostname()}.lock",
    )
    context = AppContext(
        settings=settings,
        store=store,
        send=sender,
        predictor=predictor,
        admission=Admission(store, settings, sandboxes.calculations),
        keys=keys,
        metrics=metrics,
        sandboxes=sandboxes,
        probes={
            "database": store.ping,
            "schema": store.check_schema,
            "broker": lambda: depth(celery, "teacher"),
            "data_dir": lambda: _writable(settings),
            "epoch": lambda: check_epoch(LifecycleStore(store)),
        },
        rate_limiters=create_rate_limiters(settings),
        upload_limiter=UploadLimiter(
            max_uploads=settings.uploads_at_once, max_validations=settings.validations_at_once
        ),
    )

    watcher = KeysWatcher(keys, settings, record=context.audit.record)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:  # noqa: ARG001
        if keys.is_empty:
            log.warning("api_keys_off", why="no keys file; listening on loopback only")
        remove_abandoned(settings.uploads_dir)
        sandboxes.start()
        predictor.start()
        watcher.start()
        try:
            yield
        finally:
            watcher.stop()
            await predictor.stop()
            feed.close()
            sender.close()
            sandboxes.close()
            store.engine.dispose()

    app = create_app(context, lifespan=lifespan)
    app.state.keys_watcher = watcher
    return app


def _make_directories(settings: ApiSettings) -> None:
    for name in ("datasets_dir", "runs_dir", "models_dir", "uploads_dir"):
        getattr(settings, name).mkdir(parents=True, exist_ok=True)


def _variable(error: ValidationError, detail: ErrorDetails) -> str:
    kind = ServingSettings if error.title == ServingSettings.__name__ else ApiSettings
    prefix = kind.model_config["env_prefix"]
    return prefix + ".".join(str(part) for part in detail["loc"]).upper()


def _writable(settings: ApiSettings) -> None:
    if not os.access(settings.data_dir, os.W_OK | os.X_OK):
        raise Unavailable(f"{settings.data_dir} cannot be written")


if __name__ == "__main__":
    main()
