"""Models: registered by success, promoted through the gate, never un-promoted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.shared.jobs.errors import Conflict, InvalidInput
from services.shared.jobs.state import JobState

if TYPE_CHECKING:
    from tests.jobs.conftest import House


def _evaluation(student: float, teacher: float) -> dict[str, object]:
    return {
        "heads": {"sentiment": {"macro_f1": student}},
        "teacher": {"heads": {"sentiment": {"macro_f1": teacher}}},
    }


def _student(house: House, *, macro_f1: float, **fields: object) -> str:
    teacher = house.succeed(house.running())
    job, _ = house.store.create_job(house.distill_spec({"model_id": teacher}, **fields))
    return house.succeed(house.claim(job.id), _evaluation(macro_f1, 0.9))


def test_before_the_first_promotion_an_alias_serves_nothing(house: House) -> None:
    assert house.store.active() is None


def test_a_student_that_passes_the_gate_is_promoted(house: House) -> None:
    student = _student(house, macro_f1=0.89)
    model = house.store.model(student)
    assert model.gate is not None
    assert model.gate.passed
    promotion = house.store.promote(student)
    assert house.store.active() == promotion
    assert (promotion.alias, promotion.model_id, promotion.forced) == ("default", student, False)


def test_a_student_that_lost_too_much_needs_force_and_a_reason(house: House) -> None:
    student = _student(house, macro_f1=0.5)
    with pytest.raises(Conflict, match=r"sentiment: 0\.5000 of the teacher's 0\.9000"):
        house.store.promote(student)
    with pytest.raises(InvalidInput) as refused:
        house.store.promote(student, force=True, reason="  ")
    assert refused.value.field == "reason"
    assert house.store.active() is None
    promotion = house.store.promote(student, force=True, reason="the demo is at noon")
    assert (promotion.forced, promotion.reason) == (True, "the demo is at noon")


def test_a_teacher_is_promoted_without_a_gate(house: House) -> None:
    teacher = house.succeed(house.running())
    assert house.store.model(teacher).gate is None
    assert house.store.promote(teacher, alias="big").model_id == teacher
    assert house.store.active() is None


def test_going_back_is_promoting_the_former_again(house: House) -> None:
    first, second = (house.succeed(house.running()) for _ in range(2))
    for model_id in (first, second, first):
        house.store.promote(model_id)
    assert house.store.active().model_id == first
    page = house.store.promotions(limit=2)
    rest = house.store.promotions(limit=2, cursor=page.next_cursor)
    assert [p.model_id for p in page.items + rest.items] == [first, second, first]
    assert rest.next_cursor is None


@pytest.mark.parametrize("passes", [True, False])
def test_a_spec_may_ask_for_promotion_when_the_gate_is_passed(house: House, passes: bool) -> None:
    student = _student(house, macro_f1=0.89 if passes else 0.5, promote="when_passed")
    active = house.store.active()
    assert (active.model_id if active else None) == (student if passes else None)


@pytest.mark.parametrize("state", sorted(set(JobState) - {JobState.SUCCEEDED}))
def test_a_job_without_a_model_is_a_conflict(house: House, state: JobState) -> None:
    job_id = house.in_state(state)
    with pytest.raises(Conflict, match=f"is {state}; only a job that succeeded has a model"):
        house.store.promote(job_id)


def test_a_model_is_found_by_its_job(house: House) -> None:
    claim = house.running()
    model_id = house.succeed(claim)
    assert house.store.model(claim.job_id).id == model_id


def test_a_model_whose_artifact_is_gone_is_not_promoted(house: House) -> None:
    model_id = house.succeed(house.running())
    (house.settings.model_dir(model_id) / "manifest.json").unlink()
    with pytest.raises(Conflict, match="no longer at"):
        house.store.promote(model_id)


@pytest.mark.parametrize("alias", ["", "A", "1", "a b", "a" * 65, "a\x00"])
def test_an_impossible_alias_is_refused(house: House, alias: str) -> None:
    model_id = house.succeed(house.running())
    with pytest.raises(InvalidInput):
        house.store.promote(model_id, alias=alias)
