"""Models: registered by success, promoted through the gate, never un-promoted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from services.shared.jobs.errors import Conflict, InvalidInput
from services.shared.jobs.gates import HeadComparison, Int8Gate
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


def test_the_last_word_on_a_promotion_is_shown_with_it_and_with_its_model(house: House) -> None:
    model_id = house.succeed(house.running())
    first, second = house.store.promote(model_id), house.store.promote(model_id, alias="rival")
    assert house.store.model(model_id).serving == {}
    house.store.report_refused(first.id, "no room\x00", transient=True)
    house.store.report_served(first.id, engine="packed-bfloat16")
    house.store.report_refused(second.id, "it answers otherwise", transient=False)
    shown = house.store.model(model_id).serving
    assert (shown["default"].outcome, shown["default"].engine) == ("served", "packed-bfloat16")
    assert (shown["rival"].outcome, shown["rival"].why) == ("refused", "it answers otherwise")
    rival, default = house.store.promotions().items
    assert (default.serving, rival.serving) == (shown["default"], shown["rival"])
    house.store.promote(model_id)
    assert set(house.store.list_models().items[0].serving) == {
        "rival"
    }  # of the newest nothing is known


def test_what_was_said_of_a_promotion_is_not_said_again(house: House) -> None:
    promotion = house.store.promote(house.succeed(house.running()))
    seen = []
    for free in ("1 MiB", "2 MiB"):
        house.store.report_refused(promotion.id, f"{free} are available", transient=True)
        seen.append(house.store.active().serving)
    assert seen[0] == seen[1]
    house.store.report_refused(promotion.id, "it answers otherwise", transient=False)
    assert house.store.active().serving.why == "it answers otherwise"


def test_what_was_said_is_never_changed(house: House) -> None:
    promotion = house.store.promote(house.succeed(house.running()))
    house.store.report_served(promotion.id, engine="packed-float32")
    for change in ("UPDATE servings SET engine = 'x'", "DELETE FROM servings"):
        with (
            pytest.raises(DBAPIError, match="append-only"),
            house.store.engine.begin() as connection,
        ):
            connection.execute(text(change))


def test_the_gate_for_8_bits_stands_in_the_models_row(house: House) -> None:
    model_id = house.succeed(house.running())
    assert house.store.model(model_id).int8_gate is None
    head = HeadComparison(
        texts=500, agreement=0.995, macro_f1=0.9, macro_f1_float32=0.9, passed=True
    )
    gate = Int8Gate(passed=True, calibration_texts=128, heads={"sentiment": head})
    house.store.set_int8_gate(model_id, gate)
    assert house.store.model(model_id).int8_gate == gate
