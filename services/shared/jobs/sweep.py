"""Recovers from expired leases and lost messages. Every worker runs it."""

from __future__ import annotations

from datetime import datetime, timedelta

from celery import Celery

from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.queue import QUEUES, depth, send
from services.shared.jobs.views import QueuedJob

# How long a message may take from the commit that queued the job to the queue.
_GRACE = timedelta(seconds=30)


def sweep(
    store: Store, app: Celery, *, now: datetime | None = None, ends_lost: bool = True
) -> list[QueuedJob]:
    """End attempts whose lease ran out and send again what has no message; return what was sent.

    `ends_lost=False` leaves the attempts alone: after an outage that kept their workers from renewing.

    Time is the database's unless `now` says otherwise. Safe to run concurrently. Raises
    Unavailable when the database does not answer; an unreachable broker is retried at the next sweep.
    """
    lost = store.end_lost_attempts(now=now) if ends_lost else []
    sent = [queued for queued in lost if send(app, *queued)]
    sent_before = _GRACE if now is None else now - _GRACE
    for kind in QUEUES:
        # While messages are in the queue, the missing ones are unknown and not urgent: they are sent
        # once the queue is empty. So a long queue never grows by duplicates.
        try:
            if depth(app, kind) > 0:
                continue
        except Unavailable:
            break
        for queued in store.overdue_jobs(kind, sent_before=sent_before):
            if send(app, *queued):
                sent.append(queued)
    return sent
