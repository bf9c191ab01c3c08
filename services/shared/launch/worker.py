"""A Celery worker for one kind of job: one job at a time, with the sweep in a thread; no torch."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from celery import Celery
from celery.signals import worker_ready, worker_shutting_down

from services.shared.jobs.db.store import Store, open_store
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.lifecycle.epoch import EpochMismatch
from services.shared.jobs.lifecycle.upkeep import Upkeep
from services.shared.jobs.queue import TASK, make_celery, send
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.sweep import sweep
from services.shared.launch.task import run_job
from services.shared.launch.worker_report import WorkerReporter

log = structlog.get_logger(__name__)

# Where a worker writes its pid once it takes messages, for a parent that waits for it.
READY_FILE = "STILLHOUSE_READY_FILE"
# What a worker touches after each sweep that reached the database: its age is the worker's health.
ALIVE_FILE = "STILLHOUSE_ALIVE_FILE"


def serve(queue: str, *, module: str) -> None:
    """Consume `queue` until SIGTERM: each message runs `module` on the ranks of one job.

    The pool is `solo`: the task runs in the main thread, whose death takes torchrun with it, and a
    second job on the same devices is impossible.
    """
    _configure_logs()
    settings = JobSettings()
    # Ranks start in another directory than this process.
    settings = settings.model_copy(update={"data_dir": settings.data_dir.absolute()})
    app = make_celery(settings)
    store = open_store(settings)
    worker = f"{queue}@{socket.gethostname()}:{os.getpid()}"
    stopping = threading.Event()

    def note_shutdown(**_: object) -> None:
        stopping.set()

    def note_ready(**_: object) -> None:
        ready_file = os.environ.get(READY_FILE)
        if ready_file:
            Path(ready_file).write_text(str(os.getpid()))

    worker_shutting_down.connect(note_shutdown, weak=False)
    worker_ready.connect(note_ready, weak=False)
    register_task(app, store=store, module=module, worker=worker, stopping=stopping.is_set)
    reporter = WorkerReporter(settings, name=worker, kind=queue)
    sweeper = threading.Thread(
        target=sweep_periodically,
        args=(stopping,),
        kwargs={"app": app, "store": store, "reporter": reporter},
        daemon=True,
    )
    sweeper.start()
    arguments = ["worker", "--queues", queue, "--pool", "solo", "--concurrency", "1"]
    arguments += ["--hostname", f"{queue}@%h", "--loglevel", "INFO"]
    arguments += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    try:
        app.worker_main(arguments)
    finally:
        reporter.remove()


def _configure_logs() -> None:
    """Log our events as one JSON object a line; Celery's own lines stay as they are."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def register_task(
    app: Celery, *, store: Store, module: str, worker: str, stopping: Callable[[], bool]
) -> None:
    """Register the only task with the application."""

    def run(job_id: str) -> None:
        run_job(
            job_id,
            store=store,
            module=module,
            worker=worker,
            stopping=stopping,
            send=lambda ticket: send(app, *ticket),
        )

    app.task(name=TASK)(run)


def sweep_periodically(
    stopping: threading.Event,
    *,
    app: Celery,
    store: Store,
    reporter: WorkerReporter | None = None,
) -> None:
    """Look for lost jobs and messages every `sweep_seconds`, and do the upkeep of files and records.

    A lease that ran out during an outage of the database does not mean that its worker died: it could
    not renew it. After an outage, leases are left alone for the time of a whole lease. The same holds
    after this process was stopped or its machine slept: other workers of the machine slept too.
    """
    spare_until = 0.0
    settings, upkeep = store.settings, Upkeep(store)
    grace_seconds = settings.sweep_seconds + settings.lease_seconds
    swept_at = time.time()
    _report(reporter)
    while not stopping.wait(settings.sweep_seconds):
        # The wall clock: the monotonic one stands still while a machine sleeps.
        if time.time() - swept_at > settings.sweep_seconds + settings.lease_seconds / 2:
            log.warning("sweep_was_interrupted", seconds=round(time.time() - swept_at))
            spare_until = time.monotonic() + grace_seconds
        swept_at = time.time()
        _report(reporter)
        try:
            sweep(store, app, ends_lost=time.monotonic() >= spare_until)
            if os.environ.get(ALIVE_FILE):
                Path(os.environ[ALIVE_FILE]).touch()
            upkeep.run()
        except Exception as error:  # noqa: BLE001  (the thread's boundary: report and go on)
            if isinstance(error, Unavailable) and not isinstance(error, EpochMismatch):
                spare_until = time.monotonic() + grace_seconds
            log.warning("sweep_failed", error=f"{type(error).__name__}: {error}")


def _report(reporter: WorkerReporter | None) -> None:
    if reporter is None:
        return
    try:
        reporter.write()
    except Exception as error:  # noqa: BLE001  (the doctor reads whatever a machine has)
        log.warning("worker_not_examined", error=f"{type(error).__name__}: {error}")
