"""The gates: how close a student must be to its teacher to be promoted without force, and to its own
float32 predictions to be served in 8 bits."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from services.shared.jobs.documents import Evaluation
from services.shared.jobs.evaluation_text import compare_with_baseline
from services.shared.jobs.spec import Gate


class HeadGate(BaseModel):
    """Student against teacher and baseline on one head, by macro-F1 on the same texts; None: not measured.

    The lower bounds are those of the gate's `confidence`.
    """

    model_config = ConfigDict(frozen=True)

    student_macro_f1: float | None
    teacher_macro_f1: float | None
    share: float | None  # student / teacher; None also where the teacher's is 0
    share_low: float | None = None
    gain_over_baseline: float | None = None  # student - baseline
    gain_low: float | None = None
    passed: bool


class GateResult(BaseModel):
    """Whether a student may be promoted, and why."""

    model_config = ConfigDict(frozen=True)

    passed: bool
    min_macro_f1_share: float
    min_macro_f1: float = 0.0  # the server's absolute floor
    min_gain_over_baseline: float | None = None  # None: not required
    confidence: float | None = None  # None: measured values decide, not lower bounds
    heads: dict[str, HeadGate]
    message: str


class HeadComparison(BaseModel):
    """One head: 8-bit predictions against those in float32, on the same held-out texts."""

    model_config = ConfigDict(frozen=True)

    texts: int
    agreement: float
    macro_f1: float
    macro_f1_float32: float
    passed: bool


class GateFloor(BaseModel):
    """What the server requires of every student, whatever its spec asks for."""

    model_config = ConfigDict(frozen=True)

    min_macro_f1_share: float = 0.0
    min_macro_f1: float = 0.0
    min_gain_over_baseline: float | None = None


class Int8Gate(BaseModel):
    """Whether a student may serve in 8 bits, and the figures that decided."""

    model_config = ConfigDict(frozen=True)

    passed: bool
    calibration_texts: int
    heads: dict[str, HeadComparison]


def evaluate_gate(
    gate: Gate, evaluation: Evaluation, *, floor: GateFloor = GateFloor()
) -> GateResult:
    """Compare a student's evaluation with its teacher's and its baseline's, head by head.

    `evaluation` is that of a distillation's report:
    {"heads": {name: {"macro_f1": ...}}, "teacher": {"heads": {name: {"macro_f1": ...}}}}.
    A head passes when student / teacher >= `gate.min_macro_f1_share` and student - baseline >=
    `gate.min_gain_over_baseline`; with `gate.confidence`, when the lower bounds are. What was not measured
    does not pass. `floor` is the server's: a spec may ask for more, never for less.
    """
    gains = [
        g for g in (gate.min_gain_over_baseline, floor.min_gain_over_baseline) if g is not None
    ]
    gate = gate.model_copy(
        update={
            "min_macro_f1_share": max(gate.min_macro_f1_share, floor.min_macro_f1_share),
            "min_gain_over_baseline": max(gains, default=None),
        }
    )
    student, teacher = _heads(evaluation), _heads(evaluation.get("teacher"))
    has_bounds = gate.confidence is not None and evaluation.get("confidence") == gate.confidence
    heads = {
        name: _compare(gate, floor, student[name], teacher.get(name, {}), has_bounds=has_bounds)
        for name in sorted(student)
    }
    failed = {name: head for name, head in heads.items() if not head.passed}
    return GateResult(
        passed=bool(heads) and not failed,
        min_macro_f1_share=gate.min_macro_f1_share,
        min_macro_f1=floor.min_macro_f1,
        min_gain_over_baseline=gate.min_gain_over_baseline,
        confidence=gate.confidence,
        heads=heads,
        message=_message(gate, floor, heads, failed) + _against_baseline(evaluation),
    )


def _heads(evaluation: Any) -> dict[str, dict[str, Any]]:
    heads = evaluation.get("heads") if isinstance(evaluation, dict) else None
    return {
        name: metrics if isinstance(metrics, dict) else {}
        for name, metrics in (heads or {}).items()
    }


def _compare(
    gate: Gate,
    floor: GateFloor,
    student: dict[str, Any],
    teacher: dict[str, Any],
    *,
    has_bounds: bool,
) -> HeadGate:
    ours: float | None = student.get("macro_f1")
    theirs: float | None = teacher.get("macro_f1")
    baseline: float | None = (student.get("baseline") or {}).get("macro_f1")
    bounds = student if has_bounds else {}
    measured = HeadGate(
        student_macro_f1=ours,
        teacher_macro_f1=theirs,
        share=ours / theirs if ours is not None and theirs else None,
        share_low=_low(bounds, "against_teacher", "macro_f1_share_interval"),
        gain_over_baseline=None if ours is None or baseline is None else ours - baseline,
        gain_low=_low(bounds, "against_baseline", "macro_f1_difference_interval"),
        passed=False,
    )
    passed = (
        _keeps_share(gate, measured) and not _too_low(floor, measured) and _gains(gate, measured)
    )
    return measured.model_copy(update={"passed": passed})


def _low(metrics: dict[str, Any], comparison: str, interval: str) -> float | None:
    low: float | None = ((metrics.get(comparison) or {}).get(interval) or {}).get("low")
    return low


def _keeps_share(gate: Gate, head: HeadGate) -> bool:
    if head.student_macro_f1 is None or head.teacher_macro_f1 is None:
        return False
    if head.teacher_macro_f1 == 0:
        return True  # every student reaches such a teacher
    if gate.confidence is not None:
        return head.share_low is not None and head.share_low >= gate.min_macro_f1_share
    return head.student_macro_f1 >= gate.min_macro_f1_share * head.teacher_macro_f1


def _too_low(floor: GateFloor, head: HeadGate) -> bool:
    return (head.student_macro_f1 or 0.0) < floor.min_macro_f1


def _gains(gate: Gate, head: HeadGate) -> bool:
    if gate.min_gain_over_baseline is None:
        return True
    gain = head.gain_over_baseline if gate.confidence is None else head.gain_low
    return gain is not None and gain >= gate.min_gain_over_baseline


def _message(
    gate: Gate, floor: GateFloor, heads: dict[str, HeadGate], failed: dict[str, HeadGate]
) -> str:
    if not heads:
        return "The student was not compared with its teacher: the report has no heads."
    if not failed:
        return f"Every head keeps at least {gate.min_macro_f1_share:.0%} of the teacher's macro-F1."
    too_low = {name: head for name, head in failed.items() if _too_low(floor, head)}
    if too_low:
        return (
            f"The student's macro-F1 is below this server's minimum of {floor.min_macro_f1}: "
            + "; ".join(f"{name}: {_number(h.student_macro_f1)}" for name, h in too_low.items())
        )
    level = "" if gate.confidence is None else f" with {100 * gate.confidence:g}% confidence"
    small = {name: head for name, head in failed.items() if not _keeps_share(gate, head)}
    if small:
        return (
            f"The student keeps less than {gate.min_macro_f1_share:.0%} of its teacher's macro-F1{level}: "
            + "; ".join(f"{name}: {_share(gate, head)}" for name, head in small.items())
        )
    return (
        f"The student's macro-F1 is not {gate.min_gain_over_baseline:g} above that of character n-gram counts"
        f"{level}: " + "; ".join(f"{name}: {_gain(gate, head)}" for name, head in failed.items())
    )


def _share(gate: Gate, head: HeadGate) -> str:
    if gate.confidence is not None:
        return f"a share of {_number(head.share)}, lower bound {_number(head.share_low)}"
    return f"{_number(head.student_macro_f1)} of the teacher's {_number(head.teacher_macro_f1)}"


def _gain(gate: Gate, head: HeadGate) -> str:
    gain = _number(head.gain_over_baseline, sign="+")
    return (
        gain
        if gate.confidence is None
        else f"{gain}, lower bound {_number(head.gain_low, sign='+')}"
    )


def _number(value: float | None, *, sign: str = "") -> str:
    return "not measured" if value is None else f"{value:{sign}.4f}"


def _against_baseline(evaluation: Evaluation) -> str:
    """Return how the student compares with its baseline; "" where unmeasured."""
    verdicts = compare_with_baseline(
        evaluation.get("heads"), confidence=evaluation.get("confidence"), model="student"
    )
    return "".join(f" {'' if v.is_better else 'WARNING: '}{v.sentence}." for v in verdicts)
