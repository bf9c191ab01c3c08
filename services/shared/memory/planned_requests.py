"""Name the request by the timeline of the very job, where its micro-batch is known."""

from __future__ import annotations

from services.shared.memory.catalogue import Backend
from services.shared.memory.evidence import Evidence
from services.shared.memory.matching import Candidate, Match, Role, Rounding, says_nothing
from services.shared.memory.messages import PrintedSize
from services.shared.memory.scenarios import plan_with
from services.shared.memory.sizes import MIB
from services.shared.memory.tape import rounded

_MOST_NAMES = 3
# What the timeline calls the buffers of parameters; all else it asks for are activations.
_BUFFERS = ("gathered", "flat", "whole", "reduce", "loaded", "shards", "part of", "exp_avg")
_STATE = ("exp_avg", "optimizer", "square root")


def planned_candidates(evidence: Evidence) -> tuple[Candidate, ...]:
    """Return what the planned job asks for in exactly the printed size, by name.

    Empty where micro-batch or sequence length were not told, or the size says nothing.
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
    if planned is None or says_nothing(message.requested, rounding):
        return ()
    names: dict[tuple[Role, int], dict[str, None]] = {}
    for point in planned.timeline:
        for moment in point.rising:
            if moment.request_bytes and _prints(moment.request_bytes, message.requested, rounding):
                role = Role.PARAMETERS if moment.what.startswith(_BUFFERS) else Role.ACTIVATION
                named = names.setdefault((role, moment.request_bytes), {})
                named[f"{moment.what} ({point.phase})"] = None
    match = Match.EXACT if message.requested.tolerance_bytes < MIB else Match.WITHIN_ROUNDING
    dtype = str(planned.recipe.compute)
    return tuple(
        Candidate(role, _joined(list(found)), size, _dtype(found, dtype, evidence), match)
        for (role, size), found in names.items()
    )


def _prints(request_bytes: int, asked: PrintedSize, rounding: Rounding) -> bool:
    if rounding.backend is Backend.HOST:
        # The timeline counts in blocks of the device's allocator; the host asks for exact bytes.
        return rounded(asked.size_bytes) == request_bytes
    return asked.covers(rounding.driver_request(request_bytes))


def _joined(names: list[str]) -> str:
    shown = " or ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} or {len(names) - _MOST_NAMES} others"


def _dtype(names: dict[str, None], compute: str, evidence: Evidence) -> str:
    stored = evidence.case.parameters or evidence.precision.parameters
    if all(name.startswith(_STATE) for name in names) and stored:
        return str(stored)
    return compute
