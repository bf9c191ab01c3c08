"""Jobs in the store: made, listed, moved; each state pair, each end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from services.shared.jobs.db.connection import transaction
from services.shared.jobs.db.transitions import transition
from services.shared.jobs.documents import ProgressDict
from services.shared.jobs.errors import InvalidRequest, InvalidTransition, NotFound
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.state import TRANSITIONS, JobState, Reason
from services.shared.jobs.views import Kind
from tests.factories import plan_document

if TYPE_CHECKING:
    from tests.jobs.conftest import AtOnce, StoreDriver

CRASHED = Outcome(end=End.FAILED, reason=Reason.CRASHED, message="Rank 0 crashed.", exit_code=1)


def test_a_new_job_is_queued_with_its_event(driver: StoreDriver) -> None:
    job, created = driver.create_job(
        driver.teacher_spec(name="first"), plan=plan_document(verdict="fits")
    )
    assert created
    assert (job.state, job.name, job.plan, job.attempt) == (
        JobState.QUEUED,
        "first",
        plan_document(verdict="fits"),
        0,
    )
    assert [event.data["state"] for event in driver.store.events(job.id)] == ["queued"]


def test_the_same_key_and_body_give_the_same_job(driver: StoreDriver) -> None:
    first, created = driver.create_job(driver.teacher_spec(), idempotency_key="k")
    again, created_again = driver.create_job(driver.teacher_spec(), idempotency_key="k")
    assert (created, created_again) == (True, False)
    assert again.id == first.id
    assert len(driver.store.list_jobs().items) == 1


def test_the_same_key_with_another_body_is_refused(driver: StoreDriver) -> None:
    driver.create_job(driver.teacher_spec(), idempotency_key="k")
    with pytest.raises(InvalidRequest) as refused:
        driver.create_job(driver.teacher_spec(name="other"), idempotency_key="k")
    assert refused.value.field == "Idempotency-Key"


def test_one_key_sent_concurrently_makes_one_job(driver: StoreDriver, at_once: AtOnce) -> None:
    spec = driver.teacher_spec()
    made = at_once(8, lambda _: driver.create_job(spec, idempotency_key="k"))
    assert len({job.id for job, _ in made}) == 1
    assert [created for _, created in made].count(True) == 1


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"dataset_id": "ds_none"}, "dataset_id"),
        ({"heads": ["sentiment", "mood"]}, "heads"),
        ({"model": {"model_id": "mdl_none"}}, "model.model_id"),
    ],
)
def test_a_reference_that_does_not_exist_is_refused_by_name(
    driver: StoreDriver, fields: dict[str, object], field: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        driver.create_job(driver.teacher_spec(**fields))
    assert refused.value.field == field
    assert driver.store.list_jobs().items == []


def test_an_unlabelled_dataset_cannot_be_trained_on(driver: StoreDriver) -> None:
    unlabelled = driver.add_dataset(heads=())
    with pytest.raises(InvalidRequest, match="no labels"):
        driver.create_job(driver.teacher_spec(dataset_id=unlabelled))


@pytest.mark.parametrize("odd", ["job_none", "", "\x00", "\ud800", "a" * 10_000])
def test_an_unknown_id_is_not_found_whatever_it_holds(driver: StoreDriver, odd: str) -> None:
    for look in (driver.store.job, driver.store.events, driver.store.attempts):
        with pytest.raises(NotFound):
            look(odd)
    with pytest.raises(NotFound):
        driver.store.request_cancel(odd)
    assert driver.store.claim(odd, worker="w", lease_seconds=60) is None


def test_text_that_postgres_cannot_hold_is_stored_with_replacements(driver: StoreDriver) -> None:
    claim = driver.running(name="a\x00b")
    progress: ProgressDict = {"loss": float("nan"), "message": "half a pair \ud83d", "step": 3}
    driver.store.heartbeat(claim, progress=progress, lease_seconds=60)
    driver.store.finish(claim, CRASHED.model_copy(update={"message": "nul \x00 in a log"}))
    job = driver.store.job(claim.job_id)
    assert job.name == "a\ufffdb"
    assert job.progress == {"loss": None, "message": "half a pair \ufffd", "step": 3}
    assert job.message == "nul \ufffd in a log"


# Listing


def test_pages_show_every_job_once_newest_first(driver: StoreDriver) -> None:
    made = [driver.queued().id for _ in range(7)]
    seen, cursor = [], None
    while True:
        page = driver.store.list_jobs(cursor=cursor, limit=3)
        seen += [job.id for job in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert seen == made[::-1]


def test_a_list_is_filtered_by_state_and_kind(driver: StoreDriver) -> None:
    running = driver.running()
    queued = driver.queued()
    child, _ = driver.create_job(driver.distill_spec({"job_id": queued.id}))

    def ids(*, state: JobState | None = None, kind: Kind | None = None) -> list[str]:
        return [job.id for job in driver.store.list_jobs(state=state, kind=kind).items]

    assert ids(state=JobState.RUNNING) == [running.job_id]
    assert ids(kind="distill") == [child.id]
    assert ids(state=JobState.QUEUED, kind="teacher") == [queued.id]
    assert ids(state=JobState.QUEUED, kind="distill") == []


@pytest.mark.parametrize("limit", [0, -1, 501, 2**70])
def test_a_limit_out_of_bounds_is_refused(driver: StoreDriver, limit: int) -> None:
    with pytest.raises(InvalidRequest):
        driver.store.list_jobs(limit=limit)


@pytest.mark.parametrize("cursor", ["x", "-1", "9" * 30, "²", "\x00", ""])
def test_a_cursor_of_another_list_is_refused(driver: StoreDriver, cursor: str) -> None:
    with pytest.raises(InvalidRequest):
        driver.store.promotions(cursor=cursor)


@pytest.mark.parametrize(("after_seq", "count"), [(-(2**70), 1), (0, 1), (2**70, 0)])
def test_events_are_replayed_after_any_number(
    driver: StoreDriver, after_seq: int, count: int
) -> None:
    assert len(driver.store.events(driver.queued().id, after_seq=after_seq)) == count


# Moving


@pytest.mark.parametrize("target", list(JobState))
def test_a_job_changes_state_only_as_the_transition_table_allows(
    driver: StoreDriver, target: JobState
) -> None:
    reason = Reason.CRASHED if target in (JobState.FAILED, JobState.CANCELLED) else None
    columns: dict[str, Any] = {}
    if target is JobState.RUNNING:
        columns = {"token": "t", "worker": "w", "lease_until": "2100-01-01", "attempt": 9}
        columns |= {"started_at": "now"}
    for source in JobState:
        job_id = driver.in_state(source)
        before = driver.store.events(job_id)
        with transaction(driver.store.engine) as session:
            moved = transition(session, job_id, target, reason=reason, **columns)
        assert moved == (target in TRANSITIONS[source]), source
        assert driver.store.job(job_id).state == (target if moved else source)
        assert len(driver.store.events(job_id)) == len(before) + moved


@pytest.mark.parametrize("state", list(JobState))
def test_cancelling_ends_a_job_that_has_not_started_and_requests_the_end_of_one_that_has(
    driver: StoreDriver, state: JobState
) -> None:
    job_id = driver.in_state(state)
    if state in (JobState.SUCCEEDED, JobState.FAILED):
        with pytest.raises(InvalidTransition):
            driver.store.request_cancel(job_id)
        return
    first = driver.store.request_cancel(job_id)
    second = driver.store.request_cancel(job_id)
    expected = {
        JobState.WAITING: JobState.CANCELLED,
        JobState.QUEUED: JobState.CANCELLED,
        JobState.RUNNING: JobState.CANCELLING,
        JobState.CANCELLING: JobState.CANCELLING,
        JobState.CANCELLED: JobState.CANCELLED,
    }[state]
    assert first.state == second.state == expected
    assert driver.store.events(job_id)[-1].data["state"] == expected


def test_a_cancelled_job_cannot_be_claimed(driver: StoreDriver) -> None:
    job = driver.queued()
    driver.store.request_cancel(job.id)
    assert driver.store.claim(job.id, worker="w", lease_seconds=60) is None
