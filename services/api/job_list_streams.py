"""The stream of a list of jobs: one poller for each project that is watched, however many watch it.

A poller reads which jobs had events since it last looked, and those that run, and publishes the ones that
changed. Numbers of events are assigned before their transactions commit, so an event may appear after a
later one: the poller reads the last events again each time. Call it from the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from starlette.concurrency import run_in_threadpool

from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.views import JobChanges, JobSummary

OVERLAP = 200  # events that are read again
MAX_CHANGES = 500  # jobs at once; a watcher that has missed more reads the list itself
_KEPT_JOBS = 2000


@dataclass
class JobListFeed:
    """The newest state of each job that changed; `changed` is set and replaced at each change."""

    last_seq: int = 0  # of the events that have been read
    version: int = 0  # grows with every change
    complete_since: int = 0  # changes of later versions are all kept
    jobs: dict[str, tuple[int, JobSummary]] = field(default_factory=dict)  # the oldest change first
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    subscribers: int = 0

    def since(self, version: int) -> list[JobSummary] | None:
        """Return the jobs that changed after a version, or None if some of them are no longer kept."""
        if version < self.complete_since:
            return None
        return [job for number, job in self.jobs.values() if number > version]

    def begin(self, jobs: list[JobSummary]) -> None:
        """Take over what was read first: no change to anybody who reads the list after it."""
        self.jobs = {job.id: (0, job) for job in jobs}

    def publish(self, jobs: list[JobSummary]) -> None:
        """Take over what was read, and wake the subscribers if anything of it is new."""
        news = [job for job in jobs if job.id not in self.jobs or self.jobs[job.id][1] != job]
        if not news:
            return
        for job in news:
            self.version += 1
            self.jobs.pop(job.id, None)
            self.jobs[job.id] = (self.version, job)
        while len(self.jobs) > _KEPT_JOBS:
            self.complete_since = self.jobs.pop(next(iter(self.jobs)))[0]
        self.changed.set()
        self.changed = asyncio.Event()

    def overflow(self) -> None:
        """Let every subscriber read the list again."""
        self.version += 1
        self.complete_since = self.version
        self.changed.set()
        self.changed = asyncio.Event()


class JobListStreams:
    """The pollers of all watched lists, by the project whose jobs they show."""

    def __init__(self, *, poll_seconds: float) -> None:
        self._poll_seconds = poll_seconds
        self._feeds: dict[str | None, JobListFeed] = {}
        self._pollers: dict[str | None, asyncio.Task[None]] = {}

    @property
    def num_pollers(self) -> int:
        """The number of lists that are polled."""
        return len(self._pollers)

    @asynccontextmanager
    async def subscribe(self, store: Store) -> AsyncIterator[JobListFeed]:
        """Poll the jobs that a store sees for as long as anyone watches them."""
        project = store.access.visible_project
        feed = self._feeds.get(project)
        if feed is None:
            feed = JobListFeed()
            self._feeds[project] = feed
            self._pollers[project] = asyncio.create_task(self._poll(store, feed))
        feed.subscribers += 1
        try:
            yield feed
        finally:
            feed.subscribers -= 1
            if not feed.subscribers and self._feeds.get(project) is feed:
                del self._feeds[project]
                self._pollers.pop(project).cancel()

    async def _poll(self, store: Store, feed: JobListFeed) -> None:
        has_begun = False
        while True:
            try:
                if not has_begun:
                    feed.last_seq = (await self._read(store, None)).last_seq
                changes = await self._read(store, max(0, feed.last_seq - OVERLAP))
                feed.last_seq = max(feed.last_seq, changes.last_seq)
                if not has_begun:
                    feed.begin(changes.items)
                elif changes.is_complete:
                    feed.publish(changes.items)
                else:
                    feed.overflow()
                has_begun = True
            except Unavailable:
                pass
            await asyncio.sleep(self._poll_seconds)

    async def _read(self, store: Store, after_seq: int | None) -> JobChanges:
        return await run_in_threadpool(store.job_changes, after_seq=after_seq, limit=MAX_CHANGES)
