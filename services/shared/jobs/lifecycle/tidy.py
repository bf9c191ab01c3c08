"""One round of removal: leftovers of killed processes, what retention names, what was deleted."""

from __future__ import annotations

from datetime import datetime
from itertools import islice

import structlog

from services.shared.jobs.cleanup import remove_leftovers
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.store import Store
from services.shared.jobs.lifecycle.collect import Removal, find, remove
from services.shared.jobs.lifecycle.epoch import check_epoch

log = structlog.get_logger(__name__)

_MOST_AT_ONCE = 10_000  # the rest is left to the next round


def tidy(store: Store, *, now: datetime | None = None) -> list[Removal]:
    """Remove what is no longer needed, by the database's clock unless `now` says otherwise.

    Returns what retention and deletion have removed; nothing while another process removes files or a
    backup reads them. Safe to run concurrently. Raises EpochMismatch, Unavailable.
    """
    lifecycle = LifecycleStore(store)
    check_epoch(lifecycle)
    with lifecycle.removal() as may_remove:
        if not may_remove:
            log.info("removal_postponed")
            return []
        remove_leftovers(store)
        return _collect(lifecycle, now or lifecycle.now())


def _collect(lifecycle: LifecycleStore, now: datetime) -> list[Removal]:
    found = list(islice(find(lifecycle, now=now), _MOST_AT_ONCE))  # as a dry run shows it
    for removal in found:
        remove(lifecycle, removal, now=now)
    while lifecycle.drop_unreferenced():
        continue
    return found
