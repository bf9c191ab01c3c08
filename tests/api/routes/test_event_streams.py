"""Many watchers of one job share one poller, and no caller opens more streams than its share."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.api.event_streams import EventStreams, StreamLimiter
from services.api.problems import ProblemError
from services.shared.jobs.db.store import Store
from tests.api.harness import JobDriver, Platform


def test_a_caller_has_a_limited_number_of_streams() -> None:
    limiter = StreamLimiter(max_streams=3, max_per_caller=2)
    with limiter.stream("a"), limiter.stream("a"):
        with pytest.raises(ProblemError, match="2 event streams of this key"):
            limiter.check("a")
        limiter.check("b")
        with limiter.stream("b"), pytest.raises(ProblemError, match="3 in all"):
            limiter.check("c")
    limiter.check("a")
    assert limiter.num_open == 0


class CountingStore:
    """Counts the reads of a job."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.reads = 0

    def job(self, job_id: str) -> Any:
        self.reads += 1
        return self._store.job(job_id)

    def events(self, job_id: str, **page: int) -> Any:
        return self._store.events(job_id, **page)


@pytest.mark.anyio
async def test_three_hundred_watchers_of_a_job_share_one_poller(desk: JobDriver) -> None:
    claim = desk.running()
    store: Any = CountingStore(desk.store)
    streams = EventStreams(store, poll_seconds=0.02)

    async def watch() -> list[str]:
        seen: list[str] = []
        async with streams.subscribe(claim.job_id, after_seq=0) as feed:
            seq = 0
            while not feed.has_ended or feed.after(seq):
                changed = feed.changed
                for event in feed.after(seq) or []:
                    seq = event.seq
                    seen.append(str(event.data.get("state")))
                if not feed.has_ended:
                    await changed.wait()
        return seen

    watchers = [asyncio.create_task(watch()) for _ in range(300)]
    await asyncio.sleep(0.3)
    assert streams.num_pollers == 1
    await asyncio.to_thread(desk.fail, claim)
    seen = await asyncio.wait_for(asyncio.gather(*watchers), 20)
    assert all(states[-1] == "failed" for states in seen)
    assert store.reads < 300
    assert streams.num_pollers == 0


def test_a_stream_over_the_limit_is_429(platform: Platform) -> None:
    platform.settings = platform.settings.model_copy(update={"event_streams_per_key": 1})
    desk = JobDriver(platform)
    job_id = desk.submit().json()["id"]
    context: Any = desk.client.app.state.context  # type: ignore[attr-defined]
    with context.stream_limiter.stream("testclient"):
        response = desk.client.get(f"/jobs/{job_id}/events")
    assert response.status_code == 429
    assert response.headers["retry-after"]
