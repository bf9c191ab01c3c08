"""What a worker does between sweeps: count the epoch on, remove what is over, measure what is stored."""

from __future__ import annotations

import time
from datetime import timedelta

from services.shared.jobs.db.audit import AuditLog
from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.store import Store
from services.shared.jobs.lifecycle.epoch import tick_epoch
from services.shared.jobs.lifecycle.tidy import tidy
from services.shared.jobs.lifecycle.usage import sample_usage


class Upkeep:
    """The upkeep of one worker's platform, with its own periods."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lifecycle = LifecycleStore(store)
        self._tidy_at = self._sample_at = 0.0

    def run(self) -> None:
        """Do what is due. Raises EpochMismatch, before anything is removed, Unavailable and OSError."""
        settings = self._store.settings
        tick_epoch(self._lifecycle)
        if time.monotonic() >= self._tidy_at:
            self._tidy_at = time.monotonic() + settings.tidy_seconds
            tidy(self._store)
            age = timedelta(days=settings.audit_retention_days)
            AuditLog(self._store.engine).expire(older_than=age)
        if time.monotonic() >= self._sample_at:
            self._sample_at = time.monotonic() + settings.usage_seconds
            sample_usage(self._lifecycle)
