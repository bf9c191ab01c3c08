"""The gates: how close a student must be to its teacher to be promoted without force, and to its own
float32 predictions to be served in 8 bits."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from services.shared.jobs.documents import Evaluation
from services.shared.jobs.spec import Gate


class HeadGate(BaseModel):
    """Student against teacher on one head, by macro-F1 on the same texts."""

    model_config = ConfigDict(frozen=True)

    student_macro_f1: float | None
    teacher_macro_f1: float | None
    share: float | None  # student / teacher; None where either is missing or the teacher's is 0
    passed: bool


class GateResult(BaseModel):
    """Whether a student may be promoted, and why."""

    model_config = ConfigDict(frozen=True)

    passed: bool
    min_macro_f1_share: float
    min_macro_f1: float = 0.0  # the server's absolute floor
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


class Int8Gate(BaseModel):
    """Whether a student may serve in 8 bits, and the figures that decided."""

    model_config = ConfigDict(frozen=True)

    passed: bool
    calibration_texts: int
    heads: dict[str, HeadComparison]


def evaluate_gate(
    gate: Gate, evaluation: Evaluation, *, floor: GateFloor = GateFloor()
) -> GateResult:
    """Compare a student's evaluation with its teacher's, head by head.

    `evaluation` is that of a distillation's report:
    {"heads": {name: {"macro_f1": ...}}, "teacher": {"heads": {name: {"macro_f1": ...}}}}.
    A head passes when share = student / teacher >= `gate.min_macro_f1_share`. What was not measured
    does not pass. `floor` is the server's: a spec may ask for more, never for less.
    """
    share = max(gate.min_macro_f1_share, floor.min_macro_f1_share)
    gate = gate.model_copy(update={"min_macro_f1_share": share})
    student = _macro_f1(evaluation)
    teacher = _macro_f1(evaluation.get("teacher"))
    heads = {
        name: _compare(gate, floor, student.get(name), teacher.get(name))
        for name in sorted(student)
    }
    failed = [name for name, head in heads.items() if not head.passed]
    return GateResult(
        passed=bool(heads) and not failed,
        min_macro_f1_share=gate.min_macro_f1_share,
        min_macro_f1=floor.min_macro_f1,
        heads=heads,
        message=_message(gate, floor, heads, failed) + _against_baseline(evaluation),
    )


def _against_baseline(evaluation: Any) -> str:
    """Return how the student compares with logistic regression on character n-grams; "" where unmeasured."""
    parts = []
    for name, metrics in sorted((evaluation.get("heads") or {}).items()):
        baseline = metrics.get("baseline") if isinstance(metrics, dict) else None
        if not baseline or metrics.get("macro_f1") is None:
            continue
        difference = metrics["macro_f1"] - baseline["macro_f1"]
        relation = "better" if difference > 0 else "WARNING, not better"
        parts.append(f"{name}: {relation} ({difference:+.4f} macro-F1)")
    return f" Compared with character n-gram counts: {'; '.join(parts)}." if parts else ""


def _macro_f1(evaluation: Any) -> dict[str, float | None]:
    heads = evaluation.get("heads") if isinstance(evaluation, dict) else None
    return {
        name: metrics.get("macro_f1") if isinstance(metrics, dict) else None
        for name, metrics in (heads or {}).items()
    }


def _compare(
    gate: Gate, floor: GateFloor, student: float | None, teacher: float | None
) -> HeadGate:
    share = None
    passed = False
    if student is not None and teacher is not None:
        share = student / teacher if teacher > 0 else None
        # Every student reaches a teacher whose macro-F1 is 0.
        keeps_share = teacher == 0 or student >= gate.min_macro_f1_share * teacher
        passed = keeps_share and student >= floor.min_macro_f1
    return HeadGate(student_macro_f1=student, teacher_macro_f1=teacher, share=share, passed=passed)


def _message(gate: Gate, floor: GateFloor, heads: dict[str, HeadGate], failed: list[str]) -> str:
    if not heads:
        return "The student was not compared with its teacher: the report has no heads."
    if not failed:
        return f"Every head keeps at least {gate.min_macro_f1_share:.0%} of the teacher's macro-F1."
    too_low = [
        f"{name}: {_number(heads[name].student_macro_f1)}"
        for name in failed
        if (heads[name].student_macro_f1 or 0.0) < floor.min_macro_f1
    ]
    if too_low:
        return (
            f"The student's macro-F1 is below this server's minimum of {floor.min_macro_f1}: "
            + "; ".join(too_low)
        )
    parts = [
        f"{name}: {_number(heads[name].student_macro_f1)}"
        f" of the teacher's {_number(heads[name].teacher_macro_f1)}"
        for name in failed
    ]
    return (
        f"The student keeps less than {gate.min_macro_f1_share:.0%} of its teacher's macro-F1: "
        + "; ".join(parts)
    )


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"
