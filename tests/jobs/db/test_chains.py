"""Distillations that wait for their teacher, and jobs that repeat others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from services.shared.datasets.card import Head
from services.shared.jobs.documents import RecipeFields
from services.shared.jobs.errors import InvalidRequest, InvalidTransition
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.resolved_spec import ResolvedTeacher
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.spec import DistillSpec, Recipe
from services.shared.jobs.state import JobState, Reason
from services.shared.jobs.views import Claim, JobView
from tests.factories import plan_document, retry_job

if TYPE_CHECKING:
    from tests.jobs.conftest import AtOnce, StoreDriver

CRASHED = Outcome(end=End.FAILED, reason=Reason.CRASHED, message="Rank 0 crashed.", exit_code=1)


def _child(driver: StoreDriver, job_id: str, **fields: object) -> JobView:
    return driver.create_job(driver.distill_spec({"job_id": job_id}, **fields))[0]


def test_a_child_waits_and_is_released_with_its_teacher(driver: StoreDriver) -> None:
    parent = driver.running()
    child = _child(driver, parent.job_id)
    assert (child.state, child.parent_job_id) == (JobState.WAITING, parent.job_id)
    assert driver.store.job(parent.job_id).child_job_ids == [child.id]
    model_id = driver.succeed(parent)
    released = driver.store.job(child.id)
    assert (released.state, released.teacher_model_id) == (JobState.QUEUED, model_id)
    claim = driver.claim(child.id)
    assert claim.resolved is not None
    assert claim.resolved.teacher == ResolvedTeacher(driver.settings.model_dir(model_id))


def test_a_child_of_a_finished_teacher_is_queued_at_once(driver: StoreDriver) -> None:
    parent = driver.running()
    model_id = driver.succeed(parent)
    child = _child(driver, parent.job_id)
    assert (child.state, child.teacher_model_id) == (JobState.QUEUED, model_id)


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_a_teacher_that_has_failed_is_refused(driver: StoreDriver, state: JobState) -> None:
    parent = driver.in_state(state)
    with pytest.raises(InvalidRequest, match=f"is {state} and made no model"):
        _child(driver, parent)


def test_a_failed_teacher_fails_every_waiting_descendant(driver: StoreDriver) -> None:
    parent = driver.running()
    child = _child(driver, parent.job_id)
    grandchild = _child(driver, child.id)
    other = _child(driver, parent.job_id)
    finished = driver.store.finish(parent, CRASHED)
    assert finished.to_send == []
    for job_id in (child.id, grandchild.id, other.id):
        job = driver.store.job(job_id)
        assert (job.state, job.reason) == (JobState.FAILED, Reason.PARENT_FAILED)
    message = driver.store.job(child.id).message
    assert message == f"Its teacher job {parent.job_id} is failed: Rank 0 crashed."


def test_a_teacher_cancelled_in_the_queue_fails_its_child(driver: StoreDriver) -> None:
    parent = driver.queued()
    child = _child(driver, parent.id)
    driver.store.request_cancel(parent.id)
    job = driver.store.job(child.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.PARENT_FAILED)


def test_a_teacher_with_another_attempt_keeps_its_child_waiting(driver: StoreDriver) -> None:
    parent = driver.running()
    child = _child(driver, parent.job_id)
    driver.store.finish(parent, Outcome(end=End.RETRY, reason=Reason.DEVICE_OUT_OF_MEMORY))
    assert driver.store.job(child.id).state == JobState.WAITING


def test_a_cancelled_child_is_not_released(driver: StoreDriver) -> None:
    parent = driver.running()
    child = _child(driver, parent.job_id)
    driver.store.request_cancel(child.id)
    driver.succeed(parent)
    assert driver.store.job(child.id).state == JobState.CANCELLED


def test_no_child_is_left_waiting_when_its_teacher_ends_meanwhile(
    driver: StoreDriver, at_once: AtOnce
) -> None:
    for _ in range(10):
        parent = driver.running()
        children: list[str] = []

        def either(number: int, parent: Claim = parent, children: list[str] = children) -> None:
            if number == 0:
                driver.succeed(parent)
            else:
                children.append(_child(driver, parent.job_id).id)

        at_once(4, either)
        assert {driver.store.job(child).state for child in children} == {JobState.QUEUED}


def test_a_teacher_with_other_labels_is_refused(driver: StoreDriver) -> None:
    other = driver.add_dataset(heads=(Head(name="sentiment", labels=["bad", "good"]),))
    teacher = driver.queued(dataset_id=other)
    with pytest.raises(InvalidRequest, match=r"has .*\(.*: bad, good\); .* has .*: negative, pos"):
        _child(driver, teacher.id)


def test_a_teacher_with_its_labels_in_another_order_is_accepted(driver: StoreDriver) -> None:
    other = driver.add_dataset(heads=(Head(name="sentiment", labels=["positive", "negative"]),))
    assert _child(driver, driver.queued(dataset_id=other).id).state == JobState.WAITING


def test_a_teacher_without_the_head_is_refused(driver: StoreDriver) -> None:
    domain = Head(name="domain", labels=["book", "hotel"])
    other = driver.add_dataset(heads=(domain,))
    teacher = driver.succeed(driver.running())
    with pytest.raises(
        InvalidRequest, match=r"has sentiment .*; the student has domain "
    ) as refused:
        driver.create_job(driver.distill_spec({"model_id": teacher}, dataset_id=other))
    assert refused.value.field == "heads"


# Retries


@pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
def test_a_retry_is_a_new_job(driver: StoreDriver, state: JobState) -> None:
    old = driver.store.job(driver.in_state(state))
    new = driver.retry(old.id, plan=plan_document(verdict="fits"))
    assert (new.state, new.retry_of, new.attempt) == (JobState.QUEUED, old.id, 0)
    assert (new.spec, new.plan) == (old.spec, plan_document(verdict="fits"))
    assert driver.store.job(old.id) == old


def test_a_retried_teacher_repeats_the_children_that_failed_with_it(driver: StoreDriver) -> None:
    parent = driver.running()
    child = _child(driver, parent.job_id)
    grandchild = _child(driver, child.id)
    cancelled = _child(driver, parent.job_id)
    driver.store.request_cancel(cancelled.id)
    driver.store.finish(parent, CRASHED)
    again = driver.retry(parent.job_id)
    (child_id,) = again.child_job_ids  # who was cancelled on request stays away
    new = driver.store.job(child_id)
    assert (new.state, new.retry_of, new.parent_job_id) == (JobState.WAITING, child.id, again.id)
    assert isinstance(new.spec, DistillSpec)
    assert new.spec.teacher.job_id == again.id
    assert new.recipe == driver.store.job(child.id).recipe
    (grandchild_id,) = new.child_job_ids
    assert driver.store.job(grandchild_id).retry_of == grandchild.id
    assert driver.store.job(child.id).reason == Reason.PARENT_FAILED  # what is over stays over
    model_id = driver.succeed(driver.claim(again.id))
    released = driver.store.job(child_id)
    assert (released.state, released.teacher_model_id) == (JobState.QUEUED, model_id)


def test_a_second_retry_repeats_only_children_whose_first_retry_failed(
    driver: StoreDriver,
) -> None:
    parent = driver.running()
    child = _child(driver, parent.job_id)
    driver.store.finish(parent, CRASHED)
    first, second = driver.retry(parent.job_id), driver.retry(parent.job_id)
    assert (len(first.child_job_ids), second.child_job_ids) == (1, [])
    driver.store.finish(driver.claim(first.id), CRASHED)
    third = driver.retry(first.id)
    (child_id,) = third.child_job_ids
    assert driver.store.job(child_id).retry_of == first.child_job_ids[0]
    driver.store.request_cancel(child_id)
    fourth = driver.retry(parent.job_id)
    assert [driver.store.job(one).retry_of for one in fourth.child_job_ids] == [child.id]


@pytest.mark.parametrize("state", sorted(set(JobState) - {JobState.FAILED, JobState.CANCELLED}))
def test_only_what_failed_or_was_cancelled_is_retried(driver: StoreDriver, state: JobState) -> None:
    job_id = driver.in_state(state)
    with pytest.raises(InvalidTransition):
        driver.retry(job_id)


def test_a_retry_takes_a_remedy(driver: StoreDriver) -> None:
    old = driver.in_state(JobState.FAILED)
    new = driver.retry(
        old,
        recipe_changes={"optimizer": "adafactor"},
        training_changes={"micro_batch_tokens": 1024},
    )
    assert new.spec.recipe == Recipe(optimizer="adafactor")
    assert new.spec.training.micro_batch_tokens == 1024
    assert new.recipe["optimizer"] == "adafactor"


def test_a_retry_takes_a_remedy_that_places_the_teacher(driver: StoreDriver) -> None:
    teacher = driver.succeed(driver.running())
    old = driver.create_job(driver.distill_spec({"model_id": teacher}))[0]
    driver.store.finish(driver.claim(old.id), CRASHED)
    changes: RecipeFields = {"teacher_placement": "sharded", "micro_batch_tokens": 512}
    new = driver.retry(old.id, recipe_changes=changes)
    assert isinstance(new.spec, DistillSpec)
    assert new.spec.distillation.teacher_placement == "sharded"
    assert new.recipe == old.recipe | {"micro_batch_tokens": 512}


def test_a_teacher_job_has_no_teacher_to_place(driver: StoreDriver) -> None:
    with pytest.raises(InvalidRequest) as refused:
        driver.retry(
            driver.in_state(JobState.FAILED), recipe_changes={"teacher_placement": "sharded"}
        )
    assert refused.value.field == "teacher_placement"


def test_a_retry_starts_from_the_recipe_last_used(driver: StoreDriver) -> None:
    claim = driver.running()
    changes = {"optimizer_impl": "for_loop"}
    driver.store.finish(claim, Outcome(end=End.RETRY, recipe_changes=changes))
    driver.store.finish(driver.claim(claim.job_id), CRASHED)
    assert driver.retry(claim.job_id).recipe["optimizer_impl"] == "for_loop"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"recipe_changes": {"optimizer": "magic"}}, "recipe.optimizer"),
        ({"recipe_changes": {"colour": "red"}}, "recipe.colour"),
        ({"training_changes": {"batch_size": 0}}, "training.batch_size"),
    ],
)
def test_a_remedy_that_does_not_exist_is_refused(
    driver: StoreDriver, changes: dict[str, dict[str, object]], field: str
) -> None:
    old = driver.in_state(JobState.FAILED)
    with pytest.raises(InvalidRequest) as refused:
        driver.retry(old, **changes)
    assert refused.value.field == field


def test_every_attempt_resumes_from_the_latest_checkpoint(driver: StoreDriver) -> None:
    def save(job_id: str, attempt: int, *, complete: bool = True) -> Path:
        run = RunDirectory(driver.settings.run_dir(job_id, attempt))
        (run.checkpoints / "step-10").mkdir(parents=True)
        if complete:
            (run.checkpoints / "step-10" / "COMPLETE").touch()
        return run.checkpoints

    first = driver.running()
    saved = save(first.job_id, 1)
    driver.store.hand_back(first)
    second = driver.claim(first.job_id)
    assert second.resume_dir == saved
    save(first.job_id, 2, complete=False)
    driver.store.finish(second, CRASHED)
    retry = driver.claim(driver.retry(first.job_id).id)
    assert retry.resume_dir == saved
    saved_by_retry = save(retry.job_id, 1)
    driver.store.finish(retry, CRASHED)
    assert driver.claim(driver.retry(retry.job_id).id).resume_dir == saved_by_retry


def test_the_same_key_retries_once_with_its_chain(driver: StoreDriver) -> None:
    parent = driver.running()
    _child(driver, parent.job_id)
    driver.store.finish(parent, CRASHED)
    first, created = retry_job(driver.store, parent.job_id, idempotency_key="again")
    assert created
    known, created = retry_job(driver.store, parent.job_id, idempotency_key="again")
    assert (known.id, created) == (first.id, False)
    assert len(driver.store.job(first.id).child_job_ids) == 1
    with pytest.raises(InvalidRequest, match="used for another request"):
        retry_job(
            driver.store,
            parent.job_id,
            idempotency_key="again",
            recipe_changes={"optimizer": "adafactor"},
        )
