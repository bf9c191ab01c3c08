"""Models: registered by success, promoted through the gate, never un-promoted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from services.shared.jobs.errors import Conflict, InvalidRequest
from services.shared.jobs.gates import HeadComparison, Int8Gate
from services.shared.jobs.state import JobState
from services.shared.jobs.views import ServingView

if TYPE_CHECKING:
    from tests.jobs.conftest import StoreDriver


def _evaluation(student: float, teacher: float) -> dict[str, object]:
    return {
        "heads": {"sentiment": {"macro_f1": student}},
        "teacher": {"heads": {"sentiment": {"macro_f1": teacher}}},
    }


def _student(driver: StoreDriver, *, macro_f1: float, **fields: object) -> str:
    teacher = driver.succeed(driver.running())
    job, _ = driver.create_job(driver.distill_spec({"model_id": teacher}, **fields))
    return driver.succeed(driver.claim(job.id), _evaluation(macro_f1, 0.9))


def test_before_the_first_promotion_an_alias_serves_nothing(driver: StoreDriver) -> None:
    assert driver.store.active() is None


def test_a_student_that_passes_the_gate_is_promoted(driver: StoreDriver) -> None:
    student = _student(driver, macro_f1=0.89)
    model = driver.store.model(student)
    assert model.gate is not None
    assert model.gate.passed
    promotion = driver.store.promote(student)
    assert driver.store.active() == promotion
    assert (promotion.alias, promotion.model_id, promotion.forced) == ("default", student, False)


def test_a_student_that_lost_too_much_needs_force_and_a_reason(driver: StoreDriver) -> None:
    student = _student(driver, macro_f1=0.5)
    with pytest.raises(Conflict, match=r"sentiment: 0\.5000 of the teacher's 0\.9000"):
        driver.store.promote(student)
    with pytest.raises(InvalidRequest) as refused:
        driver.store.promote(student, force=True, reason="  ")
    assert refused.value.field == "reason"
    assert driver.store.active() is None
    promotion = driver.store.promote(student, force=True, reason="the demo is at noon")
    assert (promotion.forced, promotion.reason) == (True, "the demo is at noon")


def test_a_teacher_is_promoted_without_a_gate(driver: StoreDriver) -> None:
    teacher = driver.succeed(driver.running())
    assert driver.store.model(teacher).gate is None
    assert driver.store.promote(teacher, alias="big").model_id == teacher
    assert driver.store.active() is None


def test_a_rollback_is_a_promotion_of_the_former_model(driver: StoreDriver) -> None:
    first, second = (driver.succeed(driver.running()) for _ in range(2))
    for model_id in (first, second, first):
        driver.store.promote(model_id)
    active = driver.store.active()
    assert active is not None
    assert active.model_id == first
    page = driver.store.promotions(limit=2)
    rest = driver.store.promotions(limit=2, cursor=page.next_cursor)
    assert [p.model_id for p in page.items + rest.items] == [first, second, first]
    assert rest.next_cursor is None


@pytest.mark.parametrize("passes", [True, False])
def test_a_spec_may_request_promotion_when_the_gate_is_passed(
    driver: StoreDriver, passes: bool
) -> None:
    student = _student(driver, macro_f1=0.89 if passes else 0.5, promote="when_passed")
    active = driver.store.active()
    assert (active.model_id if active else None) == (student if passes else None)


@pytest.mark.parametrize("state", sorted(set(JobState) - {JobState.SUCCEEDED}))
def test_a_job_without_a_model_is_a_conflict(driver: StoreDriver, state: JobState) -> None:
    job_id = driver.in_state(state)
    with pytest.raises(Conflict, match=f"is {state}; only a job that succeeded has a model"):
        driver.store.promote(job_id)


def test_a_model_is_found_by_its_job(driver: StoreDriver) -> None:
    claim = driver.running()
    model_id = driver.succeed(claim)
    assert driver.store.model(claim.job_id).id == model_id


def test_a_model_whose_artifact_is_gone_is_not_promoted(driver: StoreDriver) -> None:
    model_id = driver.succeed(driver.running())
    (driver.settings.model_dir(model_id) / "manifest.json").unlink()
    with pytest.raises(Conflict, match="no longer at"):
        driver.store.promote(model_id)


@pytest.mark.parametrize("alias", ["", "A", "1", "a b", "a" * 65, "a\x00"])
def test_an_impossible_alias_is_refused(driver: StoreDriver, alias: str) -> None:
    model_id = driver.succeed(driver.running())
    with pytest.raises(InvalidRequest):
        driver.store.promote(model_id, alias=alias)


def test_the_newest_serving_record_is_shown_with_the_promotion_and_the_model(
    driver: StoreDriver,
) -> None:
    model_id = driver.succeed(driver.running())
    first, second = driver.store.promote(model_id), driver.store.promote(model_id, alias="rival")
    assert driver.store.model(model_id).serving == {}
    driver.store.report_refused(first.id, "no room\x00", transient=True)
    driver.store.report_served(first.id, engine="packed-bfloat16")
    driver.store.report_refused(second.id, "it answers otherwise", transient=False)
    shown = driver.store.model(model_id).serving
    assert (shown["default"].outcome, shown["default"].engine) == ("served", "packed-bfloat16")
    assert (shown["rival"].outcome, shown["rival"].why) == ("refused", "it answers otherwise")
    rival, default = driver.store.promotions().items
    assert (default.serving, rival.serving) == (shown["default"], shown["rival"])
    driver.store.promote(model_id)
    assert set(driver.store.list_models().items[0].serving) == {
        "rival"
    }  # of the newest nothing is known


def _serving(driver: StoreDriver) -> ServingView:
    active = driver.store.active()
    assert active is not None
    assert active.serving is not None
    return active.serving


def test_an_unchanged_serving_record_is_not_stored_again(driver: StoreDriver) -> None:
    promotion = driver.store.promote(driver.succeed(driver.running()))
    seen = []
    for free in ("1 MiB", "2 MiB"):
        driver.store.report_refused(promotion.id, f"{free} are available", transient=True)
        seen.append(_serving(driver))
    assert seen[0] == seen[1]
    driver.store.report_refused(promotion.id, "it answers otherwise", transient=False)
    assert _serving(driver).why == "it answers otherwise"


def test_serving_records_are_never_changed(driver: StoreDriver) -> None:
    promotion = driver.store.promote(driver.succeed(driver.running()))
    driver.store.report_served(promotion.id, engine="packed-float32")
    for change in ("UPDATE servings SET engine = 'x'", "DELETE FROM servings"):
        with (
            pytest.raises(DBAPIError, match="append-only"),
            driver.store.engine.begin() as connection,
        ):
            connection.execute(text(change))


def test_the_gate_for_8_bits_is_stored_with_the_model(driver: StoreDriver) -> None:
    model_id = driver.succeed(driver.running())
    assert driver.store.model(model_id).int8_gate is None
    head = HeadComparison(
        texts=500, agreement=0.995, macro_f1=0.9, macro_f1_float32=0.9, passed=True
    )
    gate = Int8Gate(passed=True, calibration_texts=128, heads={"sentiment": head})
    driver.store.set_int8_gate(model_id, gate)
    assert driver.store.model(model_id).int8_gate == gate
