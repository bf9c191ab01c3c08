"""Event streams: at most one poller a job, however many watch it, and a limit on open streams.

A poller reads the job and its new events, keeps the last of them, and wakes its subscribers. It starts
with the first subscriber of a job and ends with the last. Call it from the event loop only.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool

from services.api.problems import RETRY_AFTER_SECONDS, ProblemError
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import StillhouseError, Unavailable
from services.shared.jobs.state import TERMINAL
from services.shared.jobs.views import EventView, JobView

EVENTS_AT_ONCE = 200
_KEPT_EVENTS = 1000  # of each job; a subscriber that is further behind reads the database itself


class StreamLimiter:
    """Counts open event streams, or downloads, in all and by caller."""

    def __init__(
        self, *, max_streams: int = 500, max_per_caller: int = 32, what: str = "event streams"
    ) -> None:
        self._what = what
        self._max_streams = max_streams
        self._max_per_caller = max_per_caller
        self._open: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """The number of open streams."""
        return self._open.total()

    def check(self, caller: str) -> None:
        """Raise ProblemError if `caller` may not open another stream."""
        if self.num_open >= self._max_streams or self._open[caller] >= self._max_per_caller:
            raise ProblemError(
                "overloaded",
                f"{self._open[caller]} {self._what} of this key are open, {self.num_open} in all; "
                "this server opens no more.",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            )

    @contextmanager
    def stream(self, caller: str) -> Iterator[None]:
        """Hold a stream."""
        self._open[caller] += 1
        try:
            yield
        finally:
            self._open[caller] -= 1
            if not self._open[caller]:
                del self._open[caller]


@dataclass
class JobFeed:
    """What the poller of one job has read; `changed` is set and replaced at each poll."""

    job: JobView | None = None
    last_seq: int = 0  # all events up to here have been read
    first_seq: int = 0  # events after this one are kept
    events: deque[EventView] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    subscribers: int = 0

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended and all of its events have been read."""
        return self.job is not None and self.job.state in TERMINAL

    def after(self, seq: int) -> list[EventView] | None:
        """Return the kept events after one of them, or None if some of these are no longer kept."""
        if seq < self.first_seq:
            return None
        return [event for event in self.events if event.seq > seq]

    def wake(self) -> None:
        """Let every subscriber look."""
        self.changed.set()
        self.changed = asyncio.Event()


class EventStreams:
    """The pollers of all watched jobs."""

    def __init__(self, store: Store, *, poll_seconds: float) -> None:
        self._store = store
        self._poll_seconds = poll_seconds
        self._feeds: dict[str, JobFeed] = {}
        self._pollers: dict[str, asyncio.Task[None]] = {}

    @property
    def num_pollers(self) -> int:
        """The number of jobs that are polled."""
        return len(self._pollers)

    @asynccontextmanager
    async def subscribe(self, job_id: str, *, after_seq: int) -> AsyncIterator[JobFeed]:
        """Poll a job for as long as anyone watches it."""
        feed = self._feeds.get(job_id)
        if feed is None:
            feed = JobFeed(first_seq=after_seq, last_seq=after_seq)
            self._feeds[job_id] = feed
            self._pollers[job_id] = asyncio.create_task(self._poll(job_id, feed))
        feed.subscribers += 1
        try:
            yield feed
        finally:
            feed.subscribers -= 1
            if not feed.subscribers and self._feeds.get(job_id) is feed:
                del self._feeds[job_id]
                self._pollers.pop(job_id).cancel()

    async def read(self, job_id: str, *, after_seq: int) -> list[EventView]:
        """Return the next events of a job, for a subscriber that is behind what its feed keeps."""
        return await run_in_threadpool(
            self._store.events, job_id, after_seq=after_seq, limit=EVENTS_AT_ONCE
        )

    async def _poll(self, job_id: str, feed: JobFeed) -> None:
        while True:
            try:
                # The job first: if it has ended, all its events are there to be read.
                job = await run_in_threadpool(self._store.job, job_id)
                more = True
                while more:
                    events = await self.read(job_id, after_seq=feed.last_seq)
                    more = len(events) == EVENTS_AT_ONCE
                    _keep(feed, events)
                feed.job = job
            except Unavailable:
                pass
            except StillhouseError:  # the job is gone
                feed.wake()
                return
            feed.wake()
            if feed.has_ended:
                return
            await asyncio.sleep(self._poll_seconds)


def _keep(feed: JobFeed, events: list[EventView]) -> None:
    for event in events:
        feed.events.append(event)
        feed.last_seq = event.seq
    while len(feed.events) > _KEPT_EVENTS:
        feed.first_seq = feed.events.popleft().seq
