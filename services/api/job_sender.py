"""Sends jobs to their workers within a deadline: a frozen broker must not hold a request."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError

from services.shared.jobs.views import Kind

DEADLINE_SECONDS = 2.0
_THREADS = 4


class JobSender:
    """Calls `send` in threads of its own, and waits no longer than the deadline.

    While every thread waits for the broker, further jobs are not sent at all. A job that was not sent
    is queued all the same: the sweep of the workers sends it, and a duplicate finds nothing to claim.
    """

    def __init__(
        self, send: Callable[[str, Kind], bool], *, deadline_seconds: float = DEADLINE_SECONDS
    ) -> None:
        self._send = send
        self._deadline_seconds = deadline_seconds
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="job-sender")
        self._overdue: set[Future[bool]] = set()

    def __call__(self, job_id: str, kind: Kind) -> bool:
        """Return whether the job was sent within the deadline."""
        self._overdue = {future for future in self._overdue if not future.done()}
        if len(self._overdue) >= _THREADS:
            return False
        future = self._threads.submit(self._send, job_id, kind)
        try:
            return future.result(self._deadline_seconds)
        except FutureTimeoutError:
            if not future.cancel():
                self._overdue.add(future)
            return False

    def close(self) -> None:
        """Start no further sends."""
        self._threads.shutdown(wait=False, cancel_futures=True)
