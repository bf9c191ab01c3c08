"""Whether a memory failure is established, and what a reached step refutes.

Without a message, a kill or a probe the configuration may say what would not fit, but not that
it did not.
"""

from __future__ import annotations

from dataclasses import replace

from services.shared.memory.forensics.case import Observed
from services.shared.memory.forensics.diagnosis import Cause, Hypothesis, Strength
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import FailurePhase, Framework
from services.shared.memory.forensics.state_size import Needs
from services.shared.memory.oom_log.message_formats import MessageKind
from services.shared.memory.sizes import format_size

_KILL_CODES = (-9, -7, 135, 137)
# Causes that hold from the first step on: a finished step refutes them.
_ZERO = (Framework.ZERO1, Framework.ZERO2, Framework.ZERO3)
_REFUTED_BY_A_STEP = frozenset({Cause.NOT_SHARDED, Cause.SERVING_START_UP})


def failure_is_stated(evidence: Evidence) -> bool:
    """Return whether a message, a kill, a probe or the case itself says that memory ran out."""
    case, message = evidence.case, evidence.message
    if message is not None and message.kind is MessageKind.TIME_LIMIT:
        return False
    return (
        message is not None
        or case.exit_code in _KILL_CODES
        or case.observed != Observed()
        or bool(case.out_of_memory)
    )


def without_verdict(hypothesis: Hypothesis) -> Hypothesis:
    """Return a hypothesis of a failure that nothing establishes as at most possible."""
    return replace(hypothesis, strength=min(hypothesis.strength, Strength.POSSIBLE))


def weighed_by_progress(
    evidence: Evidence, needs: Needs | None, hypothesis: Hypothesis
) -> Hypothesis:
    """Return a hypothesis with what finished steps say against it."""
    if hypothesis.cause in (Cause.NOT_SHARDED, Cause.CAPACITY):
        text = state_was_smaller(evidence, needs)
        if text is not None:
            return _excluded(hypothesis, text)
    steps = evidence.finished_steps
    if not steps:
        return hypothesis
    if hypothesis.cause in _REFUTED_BY_A_STEP:
        text = f"{steps} step{'s' * (steps > 1)} had finished: the whole training state fitted"
        return _excluded(hypothesis, text)
    return hypothesis


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


def missing_summary(evidence: Evidence) -> str:
    """Return what was looked through without finding a memory failure, and what is needed."""
    message, lines = evidence.message, evidence.log.lines
    if message is not None and message.kind is MessageKind.TIME_LIMIT:
        return "The scheduler's time limit ended the job; the log holds no memory failure."
    needed = "needed is the log of the first rank that failed, from its traceback on"
    if not lines:
        return f"The input is empty: no log was given; {needed}."
    counted = f"{lines:,} line{'s' * (lines > 1)}"
    return f"No out-of-memory message was found in {counted}; {needed}."
