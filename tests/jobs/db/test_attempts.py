"""What workers do with a job: claim, heartbeat, finish; every end of an attempt."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from typing_extensions import Unpack

from services.shared.jobs.db.store import Store
from services.shared.jobs.documents import ProgressDict
from services.shared.jobs.errors import Conflict, InvalidTransition
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.resolved_spec import ResolvedTeacher
from services.shared.jobs.run_directory import Report
from services.shared.jobs.spec import Recipe
from services.shared.jobs.state import TERMINAL, JobState, Phase, Reason
from services.shared.jobs.views import EventType, HeartbeatReply
from tests.factories import create_job, diagnosis_document, plan_document

if TYPE_CHECKING:
    from tests.jobs.conftest import AtOnce, StoreDriver

CRASHED = Outcome(end=End.FAILED, reason=Reason.CRASHED, message="Rank 0 crashed.", exit_code=1)


def test_of_concurrent_claims_one_succeeds(driver: StoreDriver, at_once: AtOnce) -> None:
    job = driver.queued()
    claims = at_once(
        12, lambda n: driver.store.claim(job.id, worker=f"worker-{n}", lease_seconds=60)
    )
    winners = [claim for claim in claims if claim is not None]
    assert len(winners) == 1
    assert [attempt.number for attempt in driver.store.attempts(job.id)] == [1]


def test_a_claim_repeated_with_its_token_after_a_lost_response_is_the_same(
    driver: StoreDriver,
) -> None:
    job = driver.queued()
    first, again = (
        driver.store.claim(job.id, worker="w", token="t" * 32, lease_seconds=60) for _ in range(2)
    )
    assert first == again
    assert first is not None
    assert len(driver.store.attempts(job.id)) == 1
    assert driver.store.claim(job.id, worker="w", token="u" * 32, lease_seconds=60) is None


def test_an_outcome_repeated_after_a_lost_response_is_applied_once(
    driver: StoreDriver,
) -> None:
    claim = driver.running()
    driver.succeed(claim)
    again = Outcome(end=End.SUCCEEDED, report=Report(outcome="succeeded"))
    assert driver.store.finish(claim, again).applied
    assert len(driver.store.list_models().items) == 1


def test_an_attempt_that_was_ended_as_lost_applies_nothing(driver: StoreDriver) -> None:
    claim = driver.running()
    driver.store.end_lost_attempts(now=driver.store.job(claim.job_id).created_at.replace(year=2999))
    for end in (End.SUCCEEDED, End.RETRY, End.FAILED):
        assert not driver.store.finish(claim, Outcome(end=end, reason=Reason.CRASHED)).applied
    assert driver.store.job(claim.job_id).state is JobState.QUEUED


@pytest.mark.parametrize("state", sorted(set(JobState) - {JobState.QUEUED}))
def test_a_late_message_claims_nothing(driver: StoreDriver, state: JobState) -> None:
    job_id = driver.in_state(state)
    before = driver.store.job(job_id)
    assert driver.store.claim(job_id, worker="late", lease_seconds=60) is None
    assert driver.store.job(job_id) == before


def test_a_claim_has_the_directory_of_every_reference(driver: StoreDriver) -> None:
    teacher = driver.succeed(driver.running())
    unlabelled = driver.add_dataset(heads=())
    job, _ = driver.create_job(
        driver.distill_spec(
            {"model_id": teacher},
            student={"model_id": teacher},
            distillation={"unlabelled_dataset_ids": [unlabelled]},
        )
    )
    claim = driver.claim(job.id)
    assert claim.problem is None
    resolved = claim.resolved
    assert resolved is not None
    assert resolved.dataset_dir == driver.settings.dataset_dir(driver.dataset_id)
    assert resolved.unlabelled_dirs == (driver.settings.dataset_dir(unlabelled),)
    assert resolved.model_dir == driver.settings.model_dir(teacher)
    assert resolved.teacher == ResolvedTeacher(driver.settings.model_dir(teacher))
    assert claim.recipe == Recipe().model_dump(mode="json")
    assert claim.resume_dir is None


def test_what_a_worker_decided_is_kept_for_the_next_attempt(driver: StoreDriver) -> None:
    claim = driver.claim(driver.queued(resources={"ranks": "auto"}).id)
    spec = claim.spec.model_copy(
        update={"resources": claim.spec.resources.model_copy(update={"ranks": 3})}
    )
    recipe = claim.recipe | {"compute": "float32", "reduce": "float32"}
    assert driver.store.settle(replace(claim, spec=spec, recipe=recipe))
    driver.store.end_lost_attempts(now=driver.store.job(claim.job_id).created_at.replace(year=2999))
    again = driver.claim(claim.job_id)
    assert (again.spec, again.recipe) == (spec, recipe)
    job = driver.store.job(claim.job_id)
    assert [attempt.recipe for attempt in job.attempts] == [recipe, recipe]
    assert not driver.store.settle(replace(claim, recipe={"compute": "bfloat16"}))
    assert driver.store.job(claim.job_id).recipe == recipe


def test_a_claim_whose_dataset_was_removed_has_a_problem(driver: StoreDriver) -> None:
    job = driver.queued()
    driver.settings.dataset_dir(driver.dataset_id).rmdir()
    problem = driver.claim(job.id).problem
    assert problem is not None
    assert (problem.end, problem.reason) == (End.FAILED, Reason.BAD_DATA)


def test_a_claim_outside_the_model_roots_has_a_problem(driver: StoreDriver, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with_root = driver.settings.model_copy(update={"model_roots": [tmp_path]})
    spec = driver.teacher_spec(model={"path": "model"})
    job, _ = create_job(Store(driver.store.engine, with_root), spec)
    problem = driver.claim(job.id).problem
    assert problem is not None
    assert problem.reason == Reason.BAD_MODEL


# Heartbeats


def test_a_heartbeat_copies_progress_and_appends_each_change_once(driver: StoreDriver) -> None:
    claim = driver.running()
    evaluation = {"heads": {"sentiment": {"macro_f1": 0.5}}}

    def beat(**progress: Unpack[ProgressDict]) -> HeartbeatReply:
        return driver.store.heartbeat(
            claim, phase=Phase.TRAINING, progress=progress, lease_seconds=60
        )

    assert beat(step=1, loss=2.0) is HeartbeatReply.CONTINUE
    beat(step=2, evaluation=evaluation)
    beat(step=3, evaluation=evaluation)
    job = driver.store.job(claim.job_id)
    assert (job.phase, job.metrics) == (Phase.TRAINING, evaluation)
    assert job.progress == {"step": 3, "loss": 2.0, "evaluation": evaluation}
    events = [(event.type, event.data) for event in driver.store.events(claim.job_id)[2:]]
    assert events == [
        (EventType.PHASE, {"phase": "training"}),
        (EventType.EVALUATION, {"step": 2, "evaluation": evaluation}),
    ]


def test_a_heartbeat_notices_a_cancellation(driver: StoreDriver) -> None:
    claim = driver.running()
    driver.store.request_cancel(claim.job_id)
    assert driver.store.heartbeat(claim, lease_seconds=60) is HeartbeatReply.CANCEL


def test_after_losing_the_lease_a_worker_changes_nothing(driver: StoreDriver) -> None:
    stale = driver.store.claim(driver.queued().id, worker="slow", lease_seconds=-1)
    assert stale is not None
    assert driver.store.end_lost_attempts()
    fresh = driver.claim(stale.job_id, worker="quick")
    before = driver.store.job(stale.job_id)
    assert (
        driver.store.heartbeat(stale, progress={"step": 9}, lease_seconds=60) is HeartbeatReply.LOST
    )
    assert not driver.store.finish(stale, CRASHED).applied
    assert not driver.store.hand_back(stale).applied
    assert driver.store.job(stale.job_id) == before
    assert driver.store.finish(fresh, CRASHED).applied


def test_a_worker_whose_lease_expired_takes_its_job_back(driver: StoreDriver) -> None:
    silent = driver.store.claim(driver.queued().id, worker="slow", lease_seconds=-1)
    assert silent is not None
    assert driver.store.end_lost_attempts()
    reply = driver.store.heartbeat(silent, progress={"step": 9}, lease_seconds=60)
    assert reply is HeartbeatReply.CONTINUE
    job = driver.store.job(silent.job_id)
    assert (job.state, job.worker, job.attempt) == (JobState.RUNNING, "slow", 1)
    (attempt,) = job.attempts
    assert (attempt.ended_at, attempt.ending, attempt.reason, attempt.message) == (None,) * 4
    assert driver.store.finish(silent, CRASHED).applied


def test_a_cancelled_job_is_not_taken_back(driver: StoreDriver) -> None:
    silent = driver.store.claim(driver.queued().id, worker="slow", lease_seconds=-1)
    assert silent is not None
    assert driver.store.end_lost_attempts()
    driver.store.request_cancel(silent.job_id)
    assert driver.store.heartbeat(silent, lease_seconds=60) is HeartbeatReply.LOST
    assert driver.store.job(silent.job_id).state == JobState.CANCELLED


# Ends


def test_success_makes_a_model_and_ends_the_attempt(driver: StoreDriver) -> None:
    claim = driver.running(name="reviews teacher")
    model_id = driver.succeed(claim, {"heads": {"sentiment": {"macro_f1": 0.8}}})
    job = driver.store.job(claim.job_id)
    assert (job.state, job.model_id, job.reason) == (JobState.SUCCEEDED, model_id, None)
    assert job.metrics == {"heads": {"sentiment": {"macro_f1": 0.8}}}
    assert job.ended_at is not None
    model = driver.store.model(model_id)
    assert (model.job_id, model.name, model.parameters) == (job.id, "reviews teacher", 10)
    assert model.path == driver.settings.model_dir(model_id)
    assert [attempt.ending for attempt in driver.store.attempts(job.id)] == ["succeeded"]


def test_a_failure_is_stored_with_its_diagnosis_and_measurements(driver: StoreDriver) -> None:
    claim = driver.running()
    outcome = Outcome(
        end=End.FAILED,
        reason=Reason.DEVICE_OUT_OF_MEMORY,
        message="Rank 1 ran out of memory.",
        exit_code=1,
        failed_rank=1,
        diagnosis=diagnosis_document(cause="not_sharded"),
        measured={"0": {"forward": 10}},
        observed={"0": {"sharded_units": 0}},
    )
    driver.store.finish(claim, outcome)
    job = driver.store.job(claim.job_id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.DEVICE_OUT_OF_MEMORY)
    assert job.diagnosis == diagnosis_document(cause="not_sharded")
    assert job.measured == {"0": {"forward": 10}}
    attempt = driver.store.attempts(claim.job_id)[0]
    assert (attempt.ending, attempt.failed_rank, attempt.exit_code) == ("failed", 1, 1)
    assert job.model_id is None


OUT_OF_MEMORY = Outcome(
    end=End.RETRY,
    reason=Reason.DEVICE_OUT_OF_MEMORY,
    message="Rank 1 ran out of memory.",
    recipe_changes={"optimizer_impl": "for_loop"},
    plan=plan_document(peak_bytes=3),
    failure={"rank": 1, "request_bytes": 932 * 2**20},
)


def test_every_attempt_keeps_its_own_plan_and_the_failure_of_its_rank(
    driver: StoreDriver,
) -> None:
    job, _ = driver.create_job(driver.teacher_spec(), plan=plan_document(peak_bytes=5))
    driver.store.finish(driver.claim(job.id), OUT_OF_MEMORY)
    assert driver.claim(job.id).plan == plan_document(peak_bytes=3)
    job = driver.store.job(job.id)
    plans = [attempt.plan for attempt in job.attempts]
    assert plans == [plan_document(peak_bytes=5), plan_document(peak_bytes=3)]
    assert [attempt.failure for attempt in job.attempts] == [OUT_OF_MEMORY.failure, None]
    assert job.plan == plan_document(peak_bytes=3)


def test_a_remedy_that_only_places_the_teacher_changes_the_plan_alone(driver: StoreDriver) -> None:
    claim = driver.running()
    moved = OUT_OF_MEMORY.model_copy(
        update={"recipe_changes": {}, "plan": plan_document(teacher_placement="sharded")}
    )
    driver.store.finish(claim, moved)
    again = driver.claim(claim.job_id)
    assert again.recipe == claim.recipe
    assert again.plan == plan_document(teacher_placement="sharded")


def test_a_retried_attempt_queues_the_job_with_the_changed_recipe(driver: StoreDriver) -> None:
    claim = driver.running()
    finished = driver.store.finish(claim, OUT_OF_MEMORY)
    assert finished.to_send == [(claim.job_id, "teacher")]
    assert driver.store.job(claim.job_id).state == JobState.QUEUED
    again = driver.claim(claim.job_id)
    assert again.attempt == 2
    assert again.recipe == claim.recipe | {"optimizer_impl": "for_loop"}
    assert driver.store.attempts(claim.job_id)[0].recipe == claim.recipe


def test_the_last_attempt_is_not_retried(driver: StoreDriver) -> None:
    claim = driver.running(max_attempts=1)
    finished = driver.store.finish(claim, OUT_OF_MEMORY)
    assert finished.to_send == []
    job = driver.store.job(claim.job_id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.DEVICE_OUT_OF_MEMORY)


def test_handing_back_uses_up_no_attempt(driver: StoreDriver) -> None:
    claim = driver.running(max_attempts=1)
    for number in (2, 3):
        finished = driver.store.hand_back(claim)
        assert finished.to_send == [(claim.job_id, "teacher")]
        claim = driver.claim(claim.job_id)
        assert claim.attempt == number
    driver.succeed(claim)


@pytest.mark.parametrize("end", [End.HANDED_BACK, End.RETRY, End.CANCELLED])
def test_a_job_being_cancelled_is_never_queued_again(driver: StoreDriver, end: End) -> None:
    claim = driver.running()
    driver.store.request_cancel(claim.job_id)
    finished = driver.store.finish(claim, Outcome(end=end, reason=Reason.CRASHED))
    job = driver.store.job(claim.job_id)
    assert (job.state, job.reason, finished.to_send) == (
        JobState.CANCELLED,
        Reason.CANCELLED,
        [],
    )


@pytest.mark.parametrize("end", [End.SUCCEEDED, End.FAILED])
def test_an_end_reached_before_the_cancellation_was_noticed_is_kept(
    driver: StoreDriver, end: End
) -> None:
    claim = driver.running()
    driver.store.request_cancel(claim.job_id)
    if end is End.SUCCEEDED:
        driver.succeed(claim)
    else:
        driver.store.finish(claim, CRASHED)
    assert driver.store.job(claim.job_id).state == end.value


def test_a_worker_cannot_cancel_without_a_request(driver: StoreDriver) -> None:
    claim = driver.running()
    with pytest.raises(InvalidTransition):
        driver.store.finish(claim, Outcome(end=End.CANCELLED, reason=Reason.CANCELLED))
    assert driver.store.job(claim.job_id).state == JobState.RUNNING


def test_finishing_twice_applies_once(driver: StoreDriver, at_once: AtOnce) -> None:
    claim = driver.running()
    applied = at_once(6, lambda _: driver.store.finish(claim, CRASHED).applied)
    assert all(applied)  # one did it, the others see that it is done
    ends = [e for e in driver.store.events(claim.job_id) if e.data.get("state") == "failed"]
    assert len(ends) == 1
    assert len(driver.store.events(claim.job_id)) == 3


def test_a_concurrent_cancellation_and_end_leave_one_consistent_state(
    driver: StoreDriver, at_once: AtOnce
) -> None:
    claim = driver.running()

    def either(number: int) -> None:
        if number == 0:
            driver.store.finish(claim, CRASHED)
            return
        with contextlib.suppress(Conflict):
            driver.store.request_cancel(claim.job_id)

    at_once(2, either)
    job = driver.store.job(claim.job_id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.CRASHED)
    assert job.state in TERMINAL
