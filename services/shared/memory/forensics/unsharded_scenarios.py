"""Two unsharded scenarios that no recipe describes, tested by what they would have printed."""

from __future__ import annotations

from services.shared.memory.forensics.diagnosis import Cause, Hypothesis, Strength
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import Framework
from services.shared.memory.forensics.matching.candidates import Match, Role
from services.shared.memory.sizes import format_size


def wrapped_replica(evidence: Evidence) -> Hypothesis | None:
    """Test that the whole model was on the device and was then wrapped unit by unit.

    It has no free parameter: each unit requests its flat buffer, then frees the original less its
    shard.
    """
    assert evidence.message is not None
    allocated = evidence.message.allocated
    assert allocated is not None
    shape, ranks = evidence.shapes[-1], evidence.ranks or 1
    units = [c for c in evidence.candidates if c.role is Role.LAYER and c.divided_by == 1]
    if not units or evidence.framework is not Framework.FSDP1:
        return None
    width = 2
    whole = shape.num_parameters * width
    layer = shape.layers[-1].elements * width
    given_back = layer - layer // ranks
    steps = [whole - index * given_back for index in range(shape.num_layers)]
    nearest = min(steps, key=lambda held: abs(held - allocated.size_bytes))
    survives = allocated.covers(nearest) and nearest == steps[0]
    what = "not sharded: whole model on the card, then wrapped"
    text = (
        f"wrapping requests {format_size(layer)} at {format_size(steps[0])}, then at "
        f"{format_size(steps[1])}, never at {format_size(allocated.size_bytes)}; nothing in it can "
        "be tuned"
    )
    if survives:
        reason = f"the whole model in 2 bytes is {format_size(whole)}, as printed"
        return Hypothesis(
            Cause.NOT_SHARDED,
            what,
            Strength.POSSIBLE,
            steps[0],
            layer,
            reasons=(reason,),
            where="wrap",
        )
    return Hypothesis(
        Cause.NOT_SHARDED,
        what,
        Strength.EXCLUDED,
        steps[0],
        layer,
        objections=(text,),
    )


def no_unit(evidence: Evidence) -> Hypothesis | None:
    """Test that no FSDP unit exists: a replica on every rank, with or without DDP.

    Excluded where a replica alone is more than was allocated; otherwise None, since with tokens
    unknown an activation may have any size.
    """
    assert evidence.message is not None
    requested, allocated = evidence.message.requested, evidence.message.allocated
    assert requested is not None
    assert allocated is not None
    shape = evidence.shapes[-1]
    whole = shape.num_parameters * 2
    if allocated.size_bytes + allocated.tolerance_bytes >= whole:
        return None
    largest = max(t.elements for unit in shape.units for t in unit.tensors) * 2
    text = f"a replica alone is {format_size(whole)}, more than was allocated"
    exact = [c for c in evidence.candidates if c.match is Match.EXACT]
    if exact and all(c.role is Role.LAYER and c.divided_by == 1 for c in exact):
        size = format_size(requested.size_bytes)
        text += (
            f"; and no weight is {size}, nor a bucket of DDP: the largest is {format_size(largest)}"
        )
    what = "not sharded: FSDP units = 0, a replica on every rank"
    return Hypothesis(
        Cause.NOT_SHARDED, what, Strength.EXCLUDED, whole, largest, objections=(text,)
    )
