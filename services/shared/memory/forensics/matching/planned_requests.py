"""The requests that the planned job makes in exactly the printed size."""

from __future__ import annotations

from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.matching.candidates import Candidate, Match, Role
from services.shared.memory.forensics.matching.rounding import Rounding, is_segment_size
from services.shared.memory.forensics.scenarios import plan_with
from services.shared.memory.oom_log.message_formats import Backend
from services.shared.memory.oom_log.message_parser import PrintedSize
from services.shared.memory.planning.allocation_tape import rounded
from services.shared.memory.sizes import MIB

_MOST_NAMES = 3
# How names of parameter buffers begin in a timeline; everything else is an activation.
_BUFFERS = (
    "gathered",
    "flat",
    "whole",
    "reduce",
    "loaded",
    "shards",
    "part of",
    "exp_avg",
    "gradient partition",
)
_STATE = ("exp_avg", "optimizer", "square root")


def planned_candidates(evidence: Evidence) -> tuple[Candidate, ...]:
    """Return the requests of the planned job that have the printed size, by name.

    Empty where micro-batch or sequence length are not given, or every small tensor prints this size.
    """
    case, message = evidence.case, evidence.message
    if message is None or message.requested is None:
        return ()
    if not (case.micro_batch and case.sequence_length and evidence.framework):
        return ()
    rounding = Rounding(
        Backend.CUDA if message.backend is Backend.UNKNOWN else message.backend,
        evidence.log.power2_divisions,
    )
    planned = plan_with(evidence)
    if planned is None or is_segment_size(message.requested, rounding):
        return ()
    names: dict[tuple[Role, int], dict[str, None]] = {}
    for point in planned.timeline:
        for moment in point.maxima:
            if moment.request_bytes and _would_print(
                moment.request_bytes, message.requested, rounding
            ):
                role = Role.PARAMETERS if moment.what.startswith(_BUFFERS) else Role.ACTIVATION
                named = names.setdefault((role, moment.request_bytes), {})
                named[f"{moment.what} ({point.phase})"] = None
    match = Match.EXACT if message.requested.tolerance_bytes < MIB else Match.WITHIN_ROUNDING
    dtype = str(planned.recipe.compute)
    return tuple(
        Candidate(role, _joined(list(found)), size, _dtype(found, dtype, evidence), match)
        for (role, size), found in names.items()
    )


def _would_print(request_bytes: int, requested: PrintedSize, rounding: Rounding) -> bool:
    if rounding.backend is Backend.HOST:
        # The timeline counts in blocks of the device's allocator; the host allocates exact bytes.
        return rounded(requested.size_bytes) == request_bytes
    return requested.covers(rounding.driver_request(request_bytes))


def _joined(names: list[str]) -> str:
    shown = " or ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} or {len(names) - _MOST_NAMES} others"


def _dtype(names: dict[str, None], compute: str, evidence: Evidence) -> str:
    stored = evidence.case.parameters or evidence.precision.parameters
    if all(name.startswith(_STATE) for name in names) and stored:
        return str(stored)
    return compute
