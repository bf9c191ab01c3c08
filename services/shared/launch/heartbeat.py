"""Heartbeats of a worker while its ranks run: lease renewal and progress for the database."""

from __future__ import annotations

from typing import Protocol, cast

import structlog

from services.shared.files.atomic_write import partial_path
from services.shared.jobs.documents import ProgressDict
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.run_directory import (
    ProgressRecord,
    RunDirectory,
    WorkerHeartbeat,
    read_records,
)
from services.shared.jobs.state import Phase
from services.shared.jobs.views import Claim, HeartbeatReply

log = structlog.get_logger(__name__)


class LeaseStore(Protocol):
    """The part of `jobs.store.Store` that a heartbeat needs."""

    def heartbeat(
        self,
        claim: Claim,
        *,
        phase: Phase | None,
        progress: ProgressDict | None,
        lease_seconds: float,
    ) -> HeartbeatReply:
        """Renew the lease of the claim and copy progress."""


class Heartbeat:
    """Renews the lease of one claim and copies what rank 0 has reported since the last heartbeat."""

    def __init__(
        self, store: LeaseStore, claim: Claim, *, run: RunDirectory, lease_seconds: float
    ) -> None:
        self._store = store
        self._claim = claim
        self._run = run
        self._lease_seconds = lease_seconds
        self._offset = 0
        self._count = 0

    def beat(self) -> HeartbeatReply:
        """Send the newest progress; return what the worker should do.

        While the database is unavailable no other worker can claim the job, so the ranks continue
        and the next heartbeat sends the same updates again.
        """
        offset, updates = self._new_updates()
        answer = HeartbeatReply.CONTINUE
        self._write_heartbeat()
        try:
            for phase, progress in updates:
                answer = self._store.heartbeat(
                    self._claim,
                    phase=phase,
                    progress=progress,
                    lease_seconds=self._lease_seconds,
                )
                if answer is HeartbeatReply.LOST:
                    return answer
        except Unavailable as error:
            log.warning("heartbeat_failed", job_id=self._claim.job_id, error=str(error))
            return HeartbeatReply.CONTINUE
        self._offset = offset
        return answer

    def _write_heartbeat(self) -> None:
        """Write the file by which the ranks know that this worker still supervises them."""
        self._count += 1
        record = WorkerHeartbeat(count=self._count, lease_seconds=self._lease_seconds)
        try:
            # Not synced: no rank reads it after a crash of the machine.
            temporary = partial_path(self._run.heartbeat)
            temporary.write_text(record.model_dump_json())
            temporary.replace(self._run.heartbeat)
        except OSError as error:  # a full disk, which the ranks report in more detail
            log.warning("heartbeat_not_written", job_id=self._claim.job_id, error=str(error))

    def _new_updates(self) -> tuple[int, list[tuple[Phase | None, ProgressDict | None]]]:
        """Return where reading ended, and the updates to send: at least one, to renew the lease.

        Ordinary lines are merged into one update; a new phase and an evaluation each keep their own, since
        each becomes an event.
        """
        offset = self._offset
        updates: list[tuple[Phase | None, ProgressDict | None]] = []
        phase: Phase | None = None
        merged: ProgressDict = {}
        for end, record in read_records(self._run.progress, ProgressRecord, offset=offset):
            offset = end
            if merged and (record.phase != phase or "evaluation" in merged):
                updates.append((phase, merged))
                merged = {}
            phase = record.phase
            changed = record.model_dump(mode="json", exclude_none=True, exclude={"phase"})
            merged |= cast("ProgressDict", changed)
        if merged or not updates:
            updates.append((phase, merged or None))
        return offset, updates
