"""Whose turn it is: priorities, turns between projects, and no line that waits for ever."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone

import pytest
from sqlalchemy import text

from services.shared.jobs.db.connection import transaction
from services.shared.jobs.db.maintenance import Maintenance
from services.shared.jobs.db.turns import _NEXT
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.projects import Access
from services.shared.jobs.quota import Quota
from services.shared.jobs.state import Reason
from services.shared.jobs.views import Claim
from tests.factories import create_job, dataset_card
from tests.jobs.conftest import AtOnce, StoreDriver


class Queue:
    """Jobs of several projects, and workers that claim them in turn."""

    def __init__(self, driver: StoreDriver) -> None:
        self.driver = driver
        self.names: dict[str, str] = {}
        self._datasets: dict[str, str] = {}

    def submit(self, project: str, *, priority: int = 0, number: int = 1) -> None:
        store = self.driver.store.within(Access(project=project))
        if project not in self._datasets:
            card = dataset_card()
            self.driver.settings.dataset_dir(card.id).mkdir(parents=True)
            self._datasets[project] = store.add_dataset(card).id
        spec = self.driver.teacher_spec(dataset_id=self._datasets[project], priority=priority)
        for _ in range(number):
            job, _ = create_job(store, spec)
            self.names[job.id] = f"{project}{priority:+d}" if priority else project

    def claim(self) -> Claim | None:
        hint = next(iter(self.names))
        chosen = self.driver.store.next_in_turn(hint)
        return None if chosen is None else self.driver.claim(chosen)

    def end(self, claim: Claim) -> None:
        outcome = Outcome(end=End.FAILED, reason=Reason.CRASHED, message="x")
        assert self.driver.store.finish(claim, outcome).applied

    def run_all(self) -> list[str]:
        """Run every job on one worker; return whose they were, in order."""
        order = []
        while (claim := self.claim()) is not None:
            order.append(self.names[claim.job_id])
            self.end(claim)
        return order

    def age(self, name: str, *, hours: float) -> None:
        ids = [job_id for job_id, each in self.names.items() if each == name]
        with transaction(self.driver.store.engine) as session:
            session.execute(
                text(
                    "UPDATE jobs SET created_at = created_at - make_interval(secs => :seconds)"
                    " WHERE id = ANY(:ids)"
                ),
                {"seconds": hours * 3600, "ids": ids},
            )


@pytest.fixture
def queue(driver: StoreDriver) -> Queue:
    return Queue(driver)


def test_projects_take_turns_however_many_jobs_each_has(queue: Queue) -> None:
    queue.submit("a", number=5)
    queue.submit("b", number=2)
    queue.submit("c")
    assert queue.run_all() == ["a", "b", "c", "a", "b", "a", "a", "a"]


def test_a_project_with_fewer_running_jobs_comes_first(queue: Queue) -> None:
    queue.submit("a", number=4)
    running = [queue.claim() for _ in range(3)]
    assert None not in running
    queue.submit("b", number=3)
    assert [queue.names[c.job_id] for _ in range(4) if (c := queue.claim())] == ["b", "b", "b", "a"]


def test_a_higher_priority_comes_first_and_projects_take_turns_within_it(queue: Queue) -> None:
    queue.submit("a", number=2)
    queue.submit("b", priority=-5)
    queue.submit("a", priority=3, number=2)
    queue.submit("b", priority=3)
    assert queue.run_all() == ["a+3", "b+3", "a+3", "a", "a", "b-5"]


def test_a_low_priority_does_not_wait_for_ever(queue: Queue) -> None:
    queue.submit("a", number=6)
    queue.submit("b", priority=-2, number=2)
    assert queue.driver.store.settings.queue_aging_seconds == 6 * 3600
    queue.age("b-2", hours=11)  # one step: still below
    claim = queue.claim()
    assert claim is not None
    assert queue.names[claim.job_id] == "a"
    queue.end(claim)
    queue.age("b-2", hours=2)  # two steps: of equal rank from now on
    assert queue.run_all() == ["b-2", "a", "b-2", "a", "a", "a", "a"]


def test_an_old_backlog_does_not_delay_the_jobs_of_others(queue: Queue) -> None:
    queue.submit("a", number=4)
    queue.age("a", hours=1000)
    queue.submit("b", number=2)
    assert queue.run_all() == ["a", "b", "a", "b", "a", "a"]


def test_jobs_of_one_line_run_in_the_order_of_submission(queue: Queue) -> None:
    queue.submit("a", number=3)
    order = []
    while (claim := queue.claim()) is not None:
        order.append(claim.job_id)
    assert order == sorted(order)


def test_each_kind_has_a_queue_of_its_own(queue: Queue) -> None:
    teacher = queue.driver.succeed(queue.driver.running())
    distill, _ = create_job(
        queue.driver.store, queue.driver.distill_spec({"model_id": teacher}, priority=9)
    )
    queue.submit("a")
    claim = queue.claim()
    assert claim is not None
    assert claim.job_id != distill.id
    assert queue.driver.store.next_in_turn(distill.id) == distill.id


def test_nothing_is_claimed_or_sent_during_maintenance(queue: Queue) -> None:
    queue.submit("a")
    maintenance = Maintenance(queue.driver.store.engine)
    maintenance.start(reason="a new disk", by="root")
    assert queue.claim() is None
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    assert queue.driver.store.overdue_jobs("teacher", sent_before=later) == []
    maintenance.end()
    assert len(queue.driver.store.overdue_jobs("teacher", sent_before=later)) == 1
    assert queue.claim() is not None


def test_a_key_at_its_quota_holds_up_no_other(queue: Queue) -> None:
    store = queue.driver.store.within(Access(actor="ci", quota=Quota(running_jobs=1)))
    jobs = [create_job(store, queue.driver.teacher_spec())[0].id for _ in range(3)]
    queue.driver.claim(jobs[0])
    queue.submit("b")
    assert queue.driver.store.claim(jobs[1], worker="w", lease_seconds=60) is None
    others = queue.driver.store.next_in_turn(jobs[1], passed_over=[jobs[1]])
    assert [others] == list(queue.names)


def test_an_unknown_job_has_no_turn(queue: Queue) -> None:
    queue.submit("a")
    assert queue.driver.store.next_in_turn("job_0") is None


def test_many_workers_claim_each_job_once(queue: Queue, at_once: AtOnce) -> None:
    queue.submit("a", number=6)
    queue.submit("b", number=6)
    hint = next(iter(queue.names))

    def work(number: int) -> list[str]:
        mine: list[str] = []
        passed_over: list[str] = []
        store = queue.driver.store
        while (chosen := store.next_in_turn(hint, passed_over=passed_over)) is not None:
            claim = store.claim(chosen, worker=f"w{number}", lease_seconds=60)
            if claim is None:
                passed_over.append(chosen)
            else:
                mine.append(claim.job_id)
        return mine

    claimed = [job_id for mine in at_once(4, work) for job_id in mine]
    assert sorted(claimed) == sorted(queue.names)


NUM_JOBS = 10_000
_COPIES = """
INSERT INTO jobs (id, kind, name, state, spec, recipe, dataset_id, max_attempts, spec_sha256, sent_at,
    project, priority)
SELECT 'job_' || lpad(number::text, 26, '0'), kind, name, state, spec, recipe, dataset_id, max_attempts,
    spec_sha256, sent_at, 'p' || number % 20, number / 20 % 5 - 4
FROM jobs, generate_series(1, :count) AS number WHERE id = :id
"""


def test_ten_thousand_queued_jobs_are_found_by_the_index(
    queue: Queue, record_property: Callable[[str, object], None]
) -> None:
    queue.submit("a")
    store = queue.driver.store
    [hint] = queue.names
    with transaction(store.engine) as session:
        session.execute(text(_COPIES), {"count": NUM_JOBS, "id": hint})
        session.execute(text("ANALYZE jobs"))
    with transaction(store.engine) as session:
        values = {"kind": "teacher", "aging_seconds": 21600.0, "passed_over": []}
        plan = session.execute(text(f"EXPLAIN (ANALYZE, FORMAT TEXT) {_NEXT.text}"), values)
        lines = [row[0] for row in plan]
    scans = [line for line in lines if " on jobs" in line]
    assert scans
    assert not [line for line in scans if "Seq Scan" in line], "\n".join(lines)
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        assert store.next_in_turn(hint) is not None
        seconds.append(time.perf_counter() - started)
    record_property("next in turn of 10,000 jobs, median ms", round(sorted(seconds)[10] * 1000, 2))
    assert sorted(seconds)[10] < 1  # 0.4 ms in the server; the rest is load of this machine
