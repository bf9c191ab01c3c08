"""What the training state leaves of the memory that was allocated, and what may have filled it."""

from __future__ import annotations

from collections.abc import Iterator

from services.shared.memory.forensics.diagnosis import (
    Cause,
    Hypothesis,
    Strength,
    likely,
    possible,
)
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import FailurePhase
from services.shared.memory.forensics.state_size import (
    NEGLIGIBLE_STATE,
    SMALL_WEIGHTS,
    Needs,
    state_is_small,
)
from services.shared.memory.oom_log.message_formats import MessageKind
from services.shared.memory.sizes import GIB, format_size

# A state below this share of what was allocated leaves the larger part to activations.
_SMALL_STATE = 0.5
# A state that is complete, of frozen weights alone, leaves the rest to activations from here on.
_COMPLETE_STATE = 0.8
_USABLE = 0.9  # of a card, for weights
_LITTLE_FOREIGN = 0.25
_FRAGMENTED_SHARE = 0.10
_OF_THE_DEVICE = (
    MessageKind.ALLOCATOR,
    MessageKind.FRACTION,
    MessageKind.MASKED,
    MessageKind.PROSE,
    MessageKind.WORKSPACE,
)
BATCH_ACTIVATIONS = "activations, logits and temporaries of the micro-batch"
_STEP_PHASES = (FailurePhase.FORWARD, FailurePhase.BACKWARD, FailurePhase.TRAIN, None)


def longer_batch(evidence: Evidence, _needs: Needs | None) -> Hypothesis | None:
    """Match a step that failed after others had finished: only what depends on its texts can grow."""
    steps = evidence.finished_steps
    if not steps or not _runs_on_device(evidence) or evidence.phase not in _STEP_PHASES:
        return None
    text = (
        f"{steps:,} step{'s' * (steps > 1)} had finished with the same state: what grew is a longer "
        "or larger batch, or tensors that are kept from step to step"
    )
    make = possible if _is_fragmented(evidence) else likely
    return make(Cause.LOGITS_OR_ACTIVATIONS, BATCH_ACTIVATIONS, text)


def activations_beyond_state(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match a step in which the larger part of what was allocated cannot be state."""
    held = _state_held(evidence, needs)
    filled = evidence.accounts.allocated_bytes or _card(evidence)
    if not held or not filled or not _runs_on_device(evidence):
        return None
    complete = evidence.trains_adapters or evidence.phase is FailurePhase.EVALUATE
    most = (_COMPLETE_STATE if complete else _SMALL_STATE) * filled
    if held > most or evidence.offloads:
        return None
    text = (
        f"of {format_size(filled)} at most {format_size(held)} are parameters, gradients and "
        "optimizer state: the rest are activations, logits and temporaries"
    )
    unsharded = _unsharded_bytes(evidence, needs)
    if unsharded and unsharded >= _SMALL_STATE * filled:
        more = f"if nothing was sharded the state is {format_size(unsharded)}"
        return possible(Cause.LOGITS_OR_ACTIVATIONS, BATCH_ACTIVATIONS, text, more)
    return likely(Cause.LOGITS_OR_ACTIVATIONS, BATCH_ACTIVATIONS, text)


def _state_held(evidence: Evidence, needs: Needs | None) -> int | None:
    """Return the most that a rank's state can be in a step or in inference; None in other phases."""
    if needs is None:
        return None
    if evidence.phase in (FailurePhase.FORWARD, FailurePhase.BACKWARD):
        return needs.rank_state_bytes
    if evidence.phase is FailurePhase.EVALUATE:
        divided = needs.sharded_weights_bytes if evidence.shards_parameters else None
        return divided or needs.whole_weights_bytes
    return None


def _unsharded_bytes(evidence: Evidence, needs: Needs | None) -> int | None:
    """Return the state of a rank if the configured sharding was not active, else None."""
    if needs is None or not evidence.shards_parameters or evidence.finished_steps:
        return None
    return needs.whole_state_bytes


def weights_beyond_card(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match a single process whose weights alone are more than the card."""
    card = _card(evidence)
    if needs is None or not card or not _runs_on_device(evidence) or evidence.offloads:
        return None
    alone = evidence.ranks == 1 or (evidence.ranks is None and evidence.framework is None)
    if not alone or needs.whole_weights_bytes <= card:
        return None
    size = format_size(needs.whole_weights_bytes)
    text = f"the weights alone are {size} on {format_size(card)}"
    make = likely if evidence.ranks == 1 else possible
    return make(Cause.CAPACITY, "the job needs more than the card has", text)


def float32_weights(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match weights that fit in 2 bytes a parameter and not in the 4 in which they are loaded."""
    card = _card(evidence)
    early = evidence.phase in (FailurePhase.LOAD, FailurePhase.WRAP)
    if needs is None or not card or not early or evidence.precision.bits:
        return None
    stated = evidence.case.parameters or evidence.precision.parameters
    if stated is not None or evidence.precision.mixed or not _runs_on_device(evidence):
        return None
    halves, floats = 2 * needs.num_parameters, 4 * needs.num_parameters
    if not halves < _USABLE * card < floats:
        return None
    text = f"{format_size(floats)} in float32, the default of from_pretrained; {format_size(halves)} in 2 bytes"
    make = likely if evidence.ranks == 1 else possible
    return make(Cause.FP32_UPCAST, "the weights are loaded in float32", text)


def explanations_left_open(
    evidence: Evidence, needs: Needs | None, known: tuple[Hypothesis, ...]
) -> tuple[Hypothesis, ...]:
    """Return the explanations that nothing given excludes, beyond those already `known`.

    They matter only where no explanation is likely: the phase, the steps and the sizes of the state
    decide which are consistent.
    """
    if any(h.strength >= Strength.LIKELY for h in known):
        return ()
    stated = {h.cause for h in known}
    return tuple(h for h in _left_open(evidence, needs) if h.cause not in stated)


def _left_open(evidence: Evidence, needs: Needs | None) -> Iterator[Hypothesis]:
    message = evidence.message
    if message is not None and message.kind is MessageKind.DRIVER and not evidence.offloads:
        text = (
            "the driver prints no sizes: the card may have been full, of this or of another process"
        )
        yield possible(Cause.OTHER_PROCESS, "another process on the card", text)
        yield possible(Cause.CAPACITY, "the job needs more than the card has", text)
        if evidence.phase not in (FailurePhase.LOAD, FailurePhase.WRAP):
            yield possible(Cause.LOGITS_OR_ACTIVATIONS, BATCH_ACTIVATIONS, text)
        return
    if not _runs_on_device(evidence):
        return
    if evidence.phase is FailurePhase.SAVE:
        yield possible(
            Cause.CHECKPOINT_GATHER, "copies made while saving", "it failed while saving"
        )
        return
    yield from _static_causes(evidence, needs)
    if evidence.phase not in (FailurePhase.LOAD, FailurePhase.WRAP, FailurePhase.OPTIMIZER_STEP):
        text = "nothing given tells the tokens of the micro-batch"
        yield possible(Cause.LOGITS_OR_ACTIVATIONS, BATCH_ACTIVATIONS, text)
    if evidence.phase is FailurePhase.OPTIMIZER_STEP:
        text = "it failed in the update"
        yield possible(Cause.OPTIMIZER_TEMPORARIES, "temporaries of the update", text)
    cached, requested = evidence.accounts.cached_bytes or 0, evidence.accounts.requested_bytes or 0
    if cached >= GIB and 2 * cached >= requested:
        text = f"{format_size(cached)} are free inside the allocator, in pieces too small to use"
        yield possible(Cause.FRAGMENTATION, "no single free block is large enough", text)


def _static_causes(evidence: Evidence, needs: Needs | None) -> Iterator[Hypothesis]:
    """Yield what holds before and in the first step: it is refuted by a finished one elsewhere."""
    if evidence.finished_steps and evidence.phase in _STEP_PHASES:
        return
    card = _card(evidence)
    early = evidence.phase in (FailurePhase.LOAD, FailurePhase.WRAP)
    if evidence.ranks != 1 and not _fits_unsharded(evidence, needs, card):
        text = "nothing given shows that the parameters were sharded"
        yield possible(Cause.NOT_SHARDED, "every rank holds the whole model", text)
    if not state_is_small(evidence, needs, card):
        text = "nothing given shows that the state fits"
        if needs is not None and needs.rank_state_bytes is not None and card:
            held = needs.whole_weights_bytes if early else needs.rank_state_bytes
            text = (
                f"{'weights' if early else 'state'} of {format_size(held)} on {format_size(card)}"
            )
        yield possible(Cause.CAPACITY, "the job needs more than the card has", text)


def _fits_unsharded(evidence: Evidence, needs: Needs | None, card: int | None) -> bool:
    if needs is None or not card:
        return False
    if evidence.phase in (FailurePhase.LOAD, FailurePhase.WRAP):
        return 2 * needs.whole_weights_bytes < SMALL_WEIGHTS * card
    return needs.whole_state_bytes < NEGLIGIBLE_STATE * card


def _card(evidence: Evidence) -> int | None:
    return evidence.accounts.usable_bytes or evidence.card_bytes


def _runs_on_device(evidence: Evidence) -> bool:
    """Return whether torch's device allocator failed with no other process in the way."""
    message = evidence.message
    if message is None:
        return bool(evidence.case.out_of_memory)
    held = evidence.accounts.allocated_bytes or 0
    little = evidence.accounts.foreign_bytes <= _LITTLE_FOREIGN * held
    return message.kind in _OF_THE_DEVICE and little


def _is_fragmented(evidence: Evidence) -> bool:
    accounts = evidence.accounts
    cached, total = accounts.cached_bytes, accounts.total_bytes
    return bool(cached and total and cached >= _FRAGMENTED_SHARE * total)
