"""Whether a memory failure is established at all.

Without a message, a kill or a probe the configuration may say what would not fit, but not that
it did not.
"""

from __future__ import annotations

from dataclasses import replace

from services.shared.memory.forensics.case import Observed
from services.shared.memory.forensics.diagnosis import Hypothesis, Strength
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.oom_log.message_formats import MessageKind

_KILL_CODES = (-9, -7, 135, 137)


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
