"""What reached steps and phases refute."""

from __future__ import annotations

from dataclasses import replace

from services.shared.memory.forensics.diagnosis import Cause, Hypothesis, Strength
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import FailurePhase, Framework
from services.shared.memory.forensics.state_size import Needs
from services.shared.memory.sizes import format_size

_ZERO = (Framework.ZERO1, Framework.ZERO2, Framework.ZERO3)
# Causes that hold from the first step on, whatever the texts: a finished step refutes them.
_REFUTED_BY_A_STEP = frozenset({Cause.NOT_SHARDED, Cause.CAPACITY, Cause.SERVING_START_UP})
# Phases in which nothing of a training step is allocated.
_BEFORE_TRAINING = (FailurePhase.LOAD, FailurePhase.WRAP)


def weighed_by_progress(
    evidence: Evidence, needs: Needs | None, hypothesis: Hypothesis
) -> Hypothesis:
    """Return a hypothesis with what finished steps say against it."""
    if hypothesis.cause in (Cause.NOT_SHARDED, Cause.CAPACITY):
        text = state_was_smaller(evidence, needs)
        if text is not None:
            return _excluded(hypothesis, text)
    steps = evidence.finished_steps
    if steps and hypothesis.cause in _REFUTED_BY_A_STEP and _is_of_the_step(evidence):
        text = f"{steps:,} step{'s' * (steps > 1)} had finished: the whole training state fitted"
        return _excluded(hypothesis, text)
    return hypothesis


def _is_of_the_step(evidence: Evidence) -> bool:
    """Return whether the failing phase is one that the finished steps went through."""
    # A step that was evaluated or saved holds more than a training step does.
    return evidence.phase not in (*_BEFORE_TRAINING, FailurePhase.SAVE, FailurePhase.EVALUATE)


def _excluded(hypothesis: Hypothesis, text: str) -> Hypothesis:
    objections = (*hypothesis.objections, text)
    return replace(hypothesis, strength=Strength.EXCLUDED, objections=objections)


def state_was_smaller(evidence: Evidence, needs: Needs | None) -> str | None:
    """Return what refutes the estimated state: ZeRO makes all of it before the first update."""
    allocated = evidence.accounts.allocated_bytes
    held = needs.rank_state_bytes if needs else None
    updating = evidence.phase is FailurePhase.OPTIMIZER_STEP and evidence.framework in _ZERO
    if not updating or not allocated or not held or allocated >= held:
        return None
    return (
        f"the update was reached with {format_size(allocated)} allocated, less than the "
        f"{format_size(held)} estimated: the state fitted"
    )
