"""Whether a memory failure is established at all.

Without a message, a kill or a probe the configuration may say what would not fit, but not that
it did not.
"""

from __future__ import annotations

from dataclasses import replace

from services.shared.memory.forensics.case import Observed
from services.shared.memory.forensics.diagnosis import Cause, Hypothesis, Strength
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.state_size import Needs
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


def what_would_not_fit(
    evidence: Evidence, needs: Needs | None, stated: tuple[Hypothesis, ...]
) -> tuple[Hypothesis, ...]:
    """Return what the configuration alone says would not fit, under that name, as at most possible."""
    held = needs.rank_state_bytes if needs else None
    if not held or not evidence.card_bytes or held <= evidence.card_bytes or evidence.offloads:
        return ()
    return tuple(
        replace(h, what=f"would not fit: {h.what}", strength=Strength.POSSIBLE)
        for h in stated
        if h.cause in _OF_THE_CONFIGURATION and h.strength is not Strength.EXCLUDED
    )


# Causes that follow from sizes and settings, without anything that happened.
_OF_THE_CONFIGURATION = (Cause.NOT_SHARDED, Cause.CAPACITY)


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
