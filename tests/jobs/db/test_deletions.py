"""Deletion in two steps: what refers to a resource refuses it, and what is gone leaves no row behind."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.errors import Conflict, InUse, InvalidRequest, NotFound
from services.shared.jobs.state import JobState
from tests.factories import failed

if TYPE_CHECKING:
    from tests.jobs.conftest import AtOnce, StoreDriver

LATER = timedelta(days=8)  # than the grace period


@pytest.fixture
def lifecycle(driver: StoreDriver) -> LifecycleStore:
    return LifecycleStore(driver.store)


@pytest.mark.parametrize(
    "state", [JobState.WAITING, JobState.QUEUED, JobState.RUNNING, JobState.CANCELLING]
)
def test_an_unfinished_job_refuses_the_deletion_of_its_dataset_and_of_itself(
    driver: StoreDriver, lifecycle: LifecycleStore, state: JobState
) -> None:
    job_id = driver.in_state(state)
    with pytest.raises(InUse) as refused:
        lifecycle.delete("dataset", driver.dataset_id, by="ops")
    assert f"job {job_id} ({state}) uses it" in refused.value.references
    with pytest.raises(InUse, match=f"it is {state}: cancel it first"):
        lifecycle.delete("job", job_id, by="ops")


def test_an_unlabelled_dataset_of_a_queued_distillation_is_not_deleted(
    driver: StoreDriver, lifecycle: LifecycleStore
) -> None:
    other, teacher = driver.add_dataset(), driver.succeed(driver.running())
    spec = driver.distill_spec(
        {"model_id": teacher}, distillation={"unlabelled_dataset_ids": [other]}
    )
    job, _ = driver.create_job(spec)
    with pytest.raises(InUse, match=job.id):
        lifecycle.delete("dataset", other, by="ops")
    with pytest.raises(InUse, match="needs it"):
        lifecycle.delete("model", teacher, by="ops")
    driver.store.request_cancel(job.id)
    lifecycle.delete("dataset", other, by="ops")
    lifecycle.delete("model", teacher, by="ops")
    with pytest.raises(InvalidRequest, match=r"unlabelled_dataset_ids\.0: there is no dataset"):
        driver.create_job(spec)
    lifecycle.restore("dataset", other)
    with pytest.raises(InvalidRequest, match=r"teacher\.model_id: there is no model"):
        driver.create_job(spec)


def test_a_model_that_an_alias_serves_or_falls_back_to_is_not_deleted(
    driver: StoreDriver, lifecycle: LifecycleStore
) -> None:
    first, second = (driver.succeed(driver.running()) for _ in range(2))
    driver.store.promote(first)
    newer = driver.store.promote(second)
    for model_id in (first, second):  # the second is not loaded yet, and may be refused
        with pytest.raises(InUse, match="alias default serves it"):
            lifecycle.delete("model", model_id, by="ops")
    driver.store.report_served(newer.id, engine="padded")
    lifecycle.delete("model", first, by="ops")
    with pytest.raises(Conflict, match="restore it before it is promoted"):
        driver.store.promote(first)
    with pytest.raises(InUse):
        lifecycle.delete("model", second, by="ops")


def test_a_failed_job_from_whose_checkpoints_a_retry_resumes_is_not_deleted(
    driver: StoreDriver, lifecycle: LifecycleStore
) -> None:
    first = driver.in_state(JobState.FAILED)
    second = driver.retry(first).id
    driver.store.finish(driver.claim(second), failed())
    third = driver.retry(second).id
    with pytest.raises(InUse, match=third):
        lifecycle.delete("job", first, by="ops")
    driver.store.request_cancel(third)
    lifecycle.delete("job", first, by="ops")
    with pytest.raises(Conflict, match="restore it before it is retried"):
        driver.retry(first)


def test_what_is_deleted_is_hidden_records_who_did_it_and_can_be_restored(
    driver: StoreDriver, lifecycle: LifecycleStore
) -> None:
    job_id = driver.in_state(JobState.SUCCEEDED)
    deletion = lifecycle.delete("job", job_id, by="ops")
    again = lifecycle.delete("job", job_id, by="another")
    assert (again.deleted_at, again.deleted_by) == (deletion.deleted_at, "ops")
    assert deletion.gone_after - deletion.deleted_at == timedelta(days=7)
    assert deletion.notes == [f"model {driver.store.model(job_id).id} stays"]
    assert driver.store.list_jobs().items == []
    assert [job.id for job in driver.store.list_jobs(deleted=True).items] == [job_id]
    assert driver.store.job(job_id).deleted_by == "ops"
    lifecycle.restore("job", job_id)
    assert [job.id for job in driver.store.list_jobs().items] == [job_id]
    with pytest.raises(Conflict, match="is not deleted"):
        lifecycle.restore("job", job_id)


def test_after_the_grace_period_a_resource_is_not_found_and_cannot_be_restored(
    driver: StoreDriver, lifecycle: LifecycleStore
) -> None:
    model_id = driver.succeed(driver.running())
    lifecycle.delete("model", model_id, by="ops")
    now = lifecycle.now()
    assert lifecycle.due("model", now=now) == []
    assert not lifecycle.purge("model", model_id, now=now)
    assert lifecycle.due("model", now=now + LATER) == [model_id]
    assert lifecycle.purge("model", model_id, now=now + LATER)
    assert lifecycle.purged_among("model", [model_id, "mdl_x"]) == [model_id]
    for look in (driver.store.model, lambda id: lifecycle.restore("model", id)):
        with pytest.raises(NotFound):
            look(model_id)


def test_a_whole_family_leaves_no_row_but_that_of_a_promoted_model(
    driver: StoreDriver, lifecycle: LifecycleStore
) -> None:
    kept, gone = (driver.succeed(driver.running()) for _ in range(2))
    driver.store.promote(kept)
    newest = driver.store.promote(driver.succeed(driver.running()))
    driver.store.report_served(newest.id, engine="padded")
    lifecycle.delete("dataset", driver.dataset_id, by="ops")
    for model_id in (kept, gone):
        lifecycle.delete("job", driver.store.model(model_id).job_id, by="ops")
        lifecycle.delete("model", model_id, by="ops")
    now = lifecycle.now() + LATER
    for resource, count in (("model", 2), ("job", 2), ("dataset", 1)):
        due = lifecycle.due(resource, now=now)  # type: ignore[arg-type]
        assert len(due) == count
        assert all(lifecycle.purge(resource, id, now=now) for id in due)  # type: ignore[arg-type]
    assert lifecycle.drop_unreferenced() == 2  # the model that nobody promoted, and its job
    assert lifecycle.drop_unreferenced() == 0
    assert [p.model_id for p in driver.store.promotions().items] == [newest.model_id, kept]


def test_a_job_and_the_deletion_of_its_dataset_at_once_never_both_succeed(
    driver: StoreDriver, lifecycle: LifecycleStore, at_once: AtOnce
) -> None:
    def race(number: int) -> str:
        try:
            if number % 2:
                lifecycle.delete("dataset", driver.dataset_id, by="ops")
                return "deleted"
            return driver.queued().id
        except (InUse, InvalidRequest):
            return "refused"

    outcomes = at_once(8, race)
    jobs = [outcome for outcome in outcomes if outcome.startswith("job_")]
    assert ("deleted" in outcomes) == (not jobs), outcomes


def test_a_promotion_and_the_deletion_of_its_model_at_once_never_both_succeed(
    driver: StoreDriver, lifecycle: LifecycleStore, at_once: AtOnce
) -> None:
    for _ in range(3):
        claim = driver.running()
        model_id = driver.succeed(claim)

        def race(number: int, model_id: str = model_id) -> str:
            try:
                if number % 2:
                    lifecycle.delete("model", model_id, by="ops")
                    return "deleted"
                return driver.store.promote(model_id, alias=f"a{number}").alias
            except Conflict:
                return "refused"

        outcomes = set(at_once(4, race)) - {"refused"}
        assert outcomes == {"deleted"} or "deleted" not in outcomes, outcomes
