"""The measurement that decides between the explanations that are left."""

from __future__ import annotations

from services.shared.memory.forensics.diagnosis import (
    Hypothesis,
    Strength,
)
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.state_size import Needs
from services.shared.memory.sizes import format_size


def next_measurement(
    evidence: Evidence, needs: Needs | None, hypotheses: tuple[Hypothesis, ...]
) -> str:
    """Return what to measure next, and what each outcome would mean."""
    left = [h for h in hypotheses if h.strength is Strength.POSSIBLE]
    computed = [h for h in left if h.step is not None]
    if len(computed) > 1:
        return _by_step(computed)
    message = evidence.message
    if message is not None and message.format_id == "B1":
        return (
            "nvidia-smi of the card at the failure, and the free host memory: bitsandbytes uses "
            "managed memory of both for paged optimizers and prints no size"
        )
    if message is None or message.allocated is None or message.requested is None:
        return (
            "the whole message of the first rank that failed: bytes requested, allocated and "
            "reserved, with its traceback" + _after_wrapping(evidence, needs, joint="; then ")
        )
    if evidence.shape is None:
        return "the model's config.json: with it the request can be matched to a tensor"
    after = _after_wrapping(evidence, needs, joint="")
    return after or "the tokens of a rank's micro-batch and the step it failed in (progress bar)"


def _by_step(left: list[Hypothesis]) -> str:
    """Return a request for step and direction, which every log has and which differ by hypothesis."""
    ordered = sorted(left, key=lambda h: (h.step or 0, h.where))
    outcomes = [f"{h.where.partition(',')[0]} means {h.what}" for h in ordered]
    return (
        "the step it failed in, and whether forward or backward (progress bar and traceback of the "
        f"failing rank): {'; '.join(outcomes)}"
    )


def _after_wrapping(evidence: Evidence, needs: Needs | None, *, joint: str) -> str:
    ranks = evidence.ranks
    if needs is None or not ranks or ranks == 1:
        return ""
    count = needs.num_parameters
    halves, floats, whole = (2 * count // ranks, 4 * count // ranks, 2 * count)
    return (
        f"{joint}memory_allocated() on every rank right after wrapping: {format_size(floats)} is "
        f"sharded float32, {format_size(halves)} sharded bfloat16, {format_size(whole)} the whole "
        "model"
    )
