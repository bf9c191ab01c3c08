"""The broker: carries ids of jobs to workers. Postgres holds the state.

A message is a hint that a job may be claimed. A duplicate finds nothing to claim; a lost one is sent
again by the sweep. So delivery need not be exact, only prompt.
"""

from __future__ import annotations

from celery import Celery
from kombu.exceptions import ChannelError, OperationalError

from services.shared.jobs.errors import Unavailable
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.views import Kind

TASK = "stillhouse.run_job"
QUEUES: dict[Kind, str] = {"teacher": "trainer", "distill": "distiller"}  # named as the services

# Celery acknowledges a message when its job has ended, hours later. Redis has no connection to watch
# for that: kombu delivers again what is unacknowledged for this long (1 h by default). A day keeps
# duplicates rare; a worker that died is noticed by its lease, not by this.
_VISIBILITY_SECONDS = 24 * 3600

_CONNECT_SECONDS = 3.0
# Longer than the blocking pop of a waiting worker (kombu: brpop_timeout = 1 s), so that only a dead
# peer runs into it.
_SOCKET_SECONDS = 10.0


def make_celery(settings: JobSettings, *, socket_seconds: float = _SOCKET_SECONDS) -> Celery:
    """Return the Celery application of API, workers and sweep; connects on first use."""
    app = Celery("stillhouse", broker=settings.broker_url, set_as_current=False)
    app.conf.update(
        # Only JSON is read: nothing that arrives is ever unpickled.
        accept_content=["json"],
        task_serializer="json",
        # A message is acknowledged when its job has ended, and given back when the worker dies.
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        # One job at a time, and no message kept from other workers meanwhile.
        worker_concurrency=1,
        worker_prefetch_multiplier=1,
        # Results are in Postgres.
        task_ignore_result=True,
        # Not used, and a worker busy for hours would not respond.
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        # Reconnect without limit, at the start too.
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=_CONNECT_SECONDS,
        # The task supervises processes of its own; losing the broker meanwhile is no reason to end.
        worker_cancel_long_running_tasks_on_connection_loss=False,
        # Logging belongs to the process that runs the worker.
        worker_hijack_root_logger=False,
        broker_transport_options={
            "visibility_timeout": _VISIBILITY_SECONDS,
            "socket_connect_timeout": _CONNECT_SECONDS,
            "socket_timeout": socket_seconds,
            "socket_keepalive": True,
        },
    )
    return app


def send(app: Celery, job_id: str, kind: Kind) -> bool:
    """Offer a job to the workers of its kind, after the commit that queued it.

    Returns False when the broker cannot be reached: the job is queued all the same, and the sweep
    sends it later. One retry covers a pooled connection that a restart of the broker has cut.
    """
    try:
        app.send_task(
            TASK,
            args=[job_id],
            queue=QUEUES[kind],
            ignore_result=True,
            retry=True,
            retry_policy={"max_retries": 1, "interval_start": 0, "interval_step": 0},
        )
    except OperationalError:
        return False
    return True


def depth(app: Celery, kind: Kind) -> int:
    """Return how many messages wait for a worker of this kind; raises Unavailable."""
    try:
        with app.connection_for_write() as connection:
            connection.ensure_connection(max_retries=1, timeout=_CONNECT_SECONDS)
            channel = connection.channel()
            return int(channel.queue_declare(queue=QUEUES[kind], passive=True).message_count)
    except ChannelError:  # no such queue: Redis keeps no empty list
        return 0
    except OperationalError as error:
        raise Unavailable(f"The broker does not answer: {error}") from error
