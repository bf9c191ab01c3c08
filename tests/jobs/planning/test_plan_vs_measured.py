"""Planned and measured memory side by side, and how far plans were off."""

from __future__ import annotations

import pytest

from services.shared.jobs.documents import JobPlanDict, ObservedSharding
from services.shared.jobs.planning.plan_vs_measured import (
    PhaseMemory,
    PlannedPhases,
    compare_phases,
)
from tests.factories import plan_document

PLAN = plan_document(phases={"wrap": 100, "forward": 1000}, recipe={"engine": "fsdp2"})
WALKED = "live parameters, gradients and optimizer state; no activations or temporaries"


def seen(basis: str | None, plan: JobPlanDict | None = PLAN) -> dict[str, PhaseMemory]:
    measured = {"0": {"wrap": 110, "forward": 900, "evaluation": 5}}
    observed: ObservedSharding | None = {"0": {"basis": basis}} if basis else None
    return compare_phases(PlannedPhases.of(plan), measured, observed)["0"].phases


def test_allocator_counters_are_compared_with_the_plan_in_every_phase() -> None:
    phases = seen("allocator")
    assert phases["wrap"].error_ratio == pytest.approx(0.1)
    assert phases["forward"].error_ratio == pytest.approx(-0.1)


def test_a_walk_over_the_state_is_not_compared_where_activations_count() -> None:
    phases = seen(WALKED)
    assert phases["wrap"].error_ratio == pytest.approx(0.1)
    assert (phases["forward"].planned_bytes, phases["forward"].measured_bytes) == (1000, 900)
    assert phases["forward"].error_ratio is None


def test_a_walk_after_wrapping_is_not_compared_under_fsdp1() -> None:
    phases = seen(WALKED, plan_document(**{**PLAN, "recipe": {"engine": "fsdp1"}}))
    assert phases["wrap"].error_ratio is None


def test_a_walk_over_a_student_is_not_compared_with_a_plan_that_has_its_teacher() -> None:
    assert seen(WALKED, {**PLAN, "teacher_placement": "sharded"})["wrap"].error_ratio is None


@pytest.mark.parametrize("basis", [None, WALKED, "allocator"])
def test_a_phase_that_was_not_planned_has_no_error(basis: str | None) -> None:
    phase = seen(basis)["evaluation"]
    assert (phase.planned_bytes, phase.measured_bytes, phase.error_ratio) == (None, 5, None)


def test_without_a_plan_or_a_measurement_there_is_no_error() -> None:
    assert compare_phases(PlannedPhases.of(PLAN), None, None) == {}
    assert seen("allocator", None)["wrap"].error_ratio is None
