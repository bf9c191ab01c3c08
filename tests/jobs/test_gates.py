"""The gate, as arithmetic."""

from __future__ import annotations

from typing import Any

import pytest

from services.shared.jobs.gates import GateFloor, evaluate_gate
from services.shared.jobs.spec import Gate

GATE = Gate(min_macro_f1_share=0.9)


def _evaluation(student: dict[str, Any], teacher: dict[str, Any]) -> dict[str, Any]:
    return {
        "heads": {name: {"macro_f1": value} for name, value in student.items()},
        "teacher": {"heads": {name: {"macro_f1": value} for name, value in teacher.items()}},
    }


@pytest.mark.parametrize(
    ("student", "teacher", "passed"),
    [
        ({"a": 0.9}, {"a": 1.0}, True),
        ({"a": 0.89}, {"a": 1.0}, False),
        ({"a": 1.0}, {"a": 0.5}, True),
        ({"a": 0.9, "b": 0.1}, {"a": 0.9, "b": 0.9}, False),
        ({"a": 0.9}, {"a": 0.9, "b": 0.9}, True),  # the student was not asked b
        ({"a": 0.9}, {}, False),
        ({"a": None}, {"a": 0.9}, False),
        ({"a": 0.9}, {"a": None}, False),
        ({"a": 0.0}, {"a": 0.0}, True),
        ({}, {"a": 0.9}, False),
    ],
)
def test_every_head_of_the_student_has_to_keep_its_share(
    student: dict[str, Any], teacher: dict[str, Any], passed: bool
) -> None:
    assert evaluate_gate(GATE, _evaluation(student, teacher)).passed is passed


@pytest.mark.parametrize("evaluation", [{}, {"heads": None}, {"heads": {"a": 3}, "teacher": 3}])
def test_a_report_without_numbers_does_not_pass(evaluation: dict[str, Any]) -> None:
    assert not evaluate_gate(GATE, evaluation).passed


def test_the_message_names_the_heads_that_did_not_pass() -> None:
    result = evaluate_gate(GATE, _evaluation({"a": 0.9, "b": 0.1, "c": None}, {"a": 0.9, "b": 0.5}))
    assert result.message == (
        "The student keeps less than 90% of its teacher's macro-F1: "
        "b: 0.1000 of the teacher's 0.5000; c: not measured of the teacher's not measured"
    )
    assert result.heads["b"].share == pytest.approx(0.2)


def test_the_server_sets_the_floor_of_every_gate() -> None:
    floor = GateFloor(min_macro_f1_share=0.8, min_macro_f1=0.2)
    lax = Gate(min_macro_f1_share=0)

    def passes(student: float, teacher: float, gate: Gate = lax) -> bool:
        return evaluate_gate(gate, _evaluation({"a": student}, {"a": teacher}), floor=floor).passed

    assert not passes(0.5, 0.9)  # keeps too small a share
    assert passes(0.8, 0.9)
    assert not passes(0.8, 0.9, GATE.model_copy(update={"min_macro_f1_share": 0.95}))
    assert not passes(0.1, 0.0)  # a damaged teacher lets no useless student pass
    assert not passes(0.19, 0.1)


def test_the_message_names_the_absolute_floor() -> None:
    floor = GateFloor(min_macro_f1=0.2)
    result = evaluate_gate(GATE, _evaluation({"a": 0.1}, {"a": 0.0}), floor=floor)
    assert "below this server's minimum of 0.2: a: 0.1000" in result.message


def test_the_message_compares_the_student_with_its_baseline() -> None:
    heads = {
        "mood": {"macro_f1": 0.9, "baseline": {"macro_f1": 0.85}},
        "topic": {"macro_f1": 0.7, "baseline": {"macro_f1": 0.75}},
    }
    result = evaluate_gate(Gate(), {"heads": heads, "teacher": {"heads": heads}})
    assert result.passed
    assert "mood: the student is better than character n-gram counts (+0.0500" in result.message
    assert "WARNING: topic: the student is not better than character n-gram" in result.message


def _with_bounds(*, share_low: float, gain_low: float, confidence: float = 0.95) -> dict[str, Any]:
    head = {
        "macro_f1": 0.9,
        "baseline": {"macro_f1": 0.85},
        "against_teacher": {"macro_f1_share_interval": {"low": share_low, "high": 1.1}},
        "against_baseline": {
            "macro_f1_difference": 0.05,
            "macro_f1_difference_interval": {"low": gain_low, "high": 0.09},
        },
    }
    teacher = {"heads": {"mood": {"macro_f1": 0.9}}}
    return {"confidence": confidence, "heads": {"mood": head}, "teacher": teacher}


def test_with_a_confidence_the_lower_bound_of_the_share_decides() -> None:
    gate = Gate(min_macro_f1_share=0.95, confidence=0.95)
    assert evaluate_gate(gate, _with_bounds(share_low=0.96, gain_low=-0.1)).passed
    refused = evaluate_gate(gate, _with_bounds(share_low=0.94, gain_low=-0.1))
    assert not refused.passed
    assert refused.heads["mood"].share_low == 0.94
    assert "with 95% confidence: mood: a share of 1.0000, lower bound 0.9400" in refused.message
    # Bounds of another level were not asked for, and none were computed by older versions.
    for evaluation in (
        _with_bounds(share_low=0.96, gain_low=0.1, confidence=0.9),
        _evaluation({"mood": 0.9}, {"mood": 0.9}),
    ):
        assert "lower bound not measured" in evaluate_gate(gate, evaluation).message


def test_a_gate_may_require_a_gain_over_the_baseline() -> None:
    evaluation = _with_bounds(share_low=0.96, gain_low=0.01)
    assert evaluate_gate(Gate(min_gain_over_baseline=0.04), evaluation).passed
    refused = evaluate_gate(Gate(min_gain_over_baseline=0.06), evaluation)
    assert not refused.passed
    assert "is not 0.06 above that of character n-gram counts: mood: +0.0500" in refused.message
    strict = Gate(min_macro_f1_share=0.9, min_gain_over_baseline=0.02, confidence=0.95)
    refused = evaluate_gate(strict, evaluation)
    assert "with 95% confidence: mood: +0.0500, lower bound +0.0100" in refused.message
    assert not evaluate_gate(
        Gate(min_gain_over_baseline=-1), _evaluation({"a": 0.9}, {"a": 0.9})
    ).passed  # without a baseline there is nothing to compare with


def test_a_spec_cannot_lower_the_servers_gain_over_the_baseline() -> None:
    evaluation = _with_bounds(share_low=0.96, gain_low=0.01)
    floor = GateFloor(min_gain_over_baseline=0.06)
    for asked in (None, -1, 0.04):
        result = evaluate_gate(Gate(min_gain_over_baseline=asked), evaluation, floor=floor)
        assert not result.passed
        assert result.min_gain_over_baseline == 0.06
    assert evaluate_gate(
        Gate(min_gain_over_baseline=-1), evaluation, floor=GateFloor(min_gain_over_baseline=0.02)
    ).passed
