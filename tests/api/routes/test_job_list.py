"""The stream of the list: who sees what, in which order, and after an interruption."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.api.job_list_streams import MAX_CHANGES, JobListFeed, JobListStreams
from services.shared.jobs.projects import Access
from services.shared.jobs.views import JobSummary
from tests.api.harness import JobDriver, Platform

JSON = {"Accept": "application/json"}


def summary(number: int, **fields: Any) -> JobSummary:
    known: dict[str, Any] = dict.fromkeys(JobSummary.model_fields)
    known |= {
        "id": f"job_{number:05}", "kind": "teacher", "state": "queued", "dataset_id": "ds_1",
        "project": "default", "priority": 0, "attempt": 0, "created_at": "2026-01-01T00:00:00Z",
    }  # fmt: skip
    return JobSummary.model_validate(known | fields)


def test_a_feed_tells_each_change_once_and_the_newest_state() -> None:
    feed = JobListFeed()
    feed.begin([summary(1)])
    assert feed.since(0) == []
    feed.publish([summary(1), summary(2)])
    assert [job.id for job in feed.since(0) or []] == ["job_00002"]
    seen = feed.version
    feed.publish([summary(2), summary(1, state="running")])
    assert [(job.id, job.state) for job in feed.since(seen) or []] == [("job_00001", "running")]


def test_a_watcher_that_is_too_far_behind_is_told_to_read_the_list() -> None:
    feed = JobListFeed()
    feed.publish([summary(number) for number in range(5)])
    assert feed.since(0) is not None
    feed.publish([summary(number) for number in range(5, 3000)])
    assert feed.since(0) is None
    assert len(feed.since(feed.version - 10) or []) == 10
    feed.overflow()
    assert feed.since(feed.version - 1) is None
    assert feed.since(feed.version) == []


@pytest.mark.anyio
async def test_many_watchers_of_a_project_share_one_poller_and_see_every_change(
    desk: JobDriver,
) -> None:
    streams = JobListStreams(poll_seconds=0.02)
    before = desk.submit().json()["id"]

    async def watch(until: str) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        async with streams.subscribe(desk.store) as feed:
            seen = feed.version
            while (until, "failed") not in found:
                changed, version = feed.changed, feed.version
                found += [(job.id, str(job.state)) for job in feed.since(seen) or []]
                seen = version
                if (until, "failed") not in found:
                    await asyncio.wait_for(changed.wait(), 10)
        return found

    tasks = [asyncio.create_task(watch(before)) for _ in range(50)]
    await asyncio.sleep(0.3)
    assert streams.num_pollers == 1
    claim = await asyncio.to_thread(desk.store.claim, before, worker="w", lease_seconds=60)
    await asyncio.sleep(0.1)
    assert claim is not None
    await asyncio.to_thread(desk.fail, claim)
    for found in await asyncio.gather(*tasks):
        assert found == [(before, "running"), (before, "failed")]
    assert streams.num_pollers == 0


def test_changes_after_an_event_and_nothing_of_another_project(platform: Platform) -> None:
    desk = JobDriver(platform)
    first = desk.submit().json()["id"]
    at = desk.client.get("/jobs/events", headers=JSON).json()
    assert at["items"] == []
    second = desk.submit().json()["id"]
    after = {**JSON, "Last-Event-ID": str(at["last_seq"])}
    changes = desk.client.get("/jobs/events", headers=after).json()
    assert [job["id"] for job in changes["items"]] == [second]
    assert changes["is_complete"]
    everything = desk.client.get("/jobs/events", headers={**JSON, "Last-Event-ID": "0"}).json()
    assert [job["id"] for job in everything["items"]] == [second, first]
    other = desk.store.within(Access(project="theirs", sees_all=False))
    assert other.job_changes(after_seq=0).items == []
    assert other.job_counts() == []
    limited = desk.store.job_changes(after_seq=0, limit=1)
    assert (len(limited.items), limited.is_complete) == (1, False)
    assert MAX_CHANGES <= 500


def test_the_list_is_filtered_by_a_part_of_the_name_and_by_key(desk: JobDriver) -> None:
    names = ["Nightly 100%", "nightly two", "other"]
    ids = [desk.submit(desk.spec(name=name)).json()["id"] for name in names]

    def found(**query: str) -> list[str]:
        return [job["id"] for job in desk.client.get("/jobs", params=query).json()["items"]]

    assert found(search="NIGHTLY") == [ids[1], ids[0]]
    assert found(search="100%") == [ids[0]]  # no pattern
    assert found(search="%") == [ids[0]]
    assert found(search=ids[2][4:]) == [ids[2]]
    assert found(created_by="local") == ids[::-1]
    assert found(created_by="nobody") == []
    assert desk.client.get("/jobs", params={"search": "a\0b"}).status_code == 422
