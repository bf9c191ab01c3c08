"""Rules that compare what the job needs, in bytes per parameter, with what there is."""

from __future__ import annotations

from services.shared.memory.forensics.case import Observed
from services.shared.memory.forensics.diagnosis import (
    Cause,
    Hypothesis,
    Sharded,
    Strength,
    certain,
    likely,
    possible,
)
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import FailurePhase, Framework
from services.shared.memory.forensics.matching.candidates import Match
from services.shared.memory.forensics.rules.texts import kill_strength
from services.shared.memory.forensics.sharding_verdict import judge_sharding
from services.shared.memory.forensics.state_size import Needs, state_is_small
from services.shared.memory.oom_log.message_formats import MessageKind
from services.shared.memory.oom_log.message_parser import excerpt
from services.shared.memory.oom_log.traceback_sites import Note
from services.shared.memory.sizes import format_size

# Training state above this share of the device leaves no room for a step: gathered units and the
# activations of a short micro-batch take at least a third of what such a state takes.
_FULL_STATE_SHARE = 0.60
# Weights above this share leave no room for the cache and the logits of one long prompt.
_FULL_WEIGHTS_SHARE = 0.90


_KILL_CODES = (-9, 137)


_DEVICE_KINDS = (
    MessageKind.ALLOCATOR,
    MessageKind.FRACTION,
    MessageKind.MASKED,
    MessageKind.PROSE,
    MessageKind.WORKSPACE,
)


def probe_found_unsharded(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match a probe that found whole parameters on a rank, or no unit."""
    if not evidence.shards_parameters:
        return None
    sharded, shown = judge_sharding(evidence)
    if evidence.case.observed == Observed() or sharded is not Sharded.NO:
        return None
    card = evidence.card_bytes
    if needs is None or card is None or needs.whole_state_bytes <= card:
        return likely(Cause.NOT_SHARDED, "the wrapped model was not divided", *shown)
    text = f"its state is {format_size(needs.whole_state_bytes)}, the card has {format_size(card)}"
    return certain(Cause.NOT_SHARDED, "the wrapped model was not divided", *shown, text)


def host_out_of_memory(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match a kill, or a message of the host's own allocator."""
    message, case = evidence.message, evidence.case
    reasons = []
    if needs and needs.host_bytes:
        have = f" of {format_size(case.host_memory_bytes)}" if case.host_memory_bytes else ""
        reasons.append(f"offloading takes {format_size(needs.host_bytes)}{have} of host memory")
    if message is None or message.kind is MessageKind.TIME_LIMIT:
        if message is not None or case.exit_code not in _KILL_CODES:
            return None
        reasons.insert(
            0, f"exit code {case.exit_code}: killed from outside, without a message of torch"
        )
        return likely(Cause.HOST_MEMORY, "the host ran out of memory", *reasons)
    if message.kind is MessageKind.HOST_ALLOCATOR:
        text = f"the host's own allocator refused: {excerpt(message.text, 0, 120)}"
        # torch's own allocator prints the bytes; other texts may mean another resource.
        make = certain if message.requested else likely
        return make(Cause.HOST_MEMORY, "a host allocation failed", text, *reasons)
    if message.kind is MessageKind.KILLED:
        text = f"a process was killed from outside: {excerpt(message.text, 0, 120)}"
        strength = kill_strength(evidence)
        reasons += _copies(evidence, needs)
        what = "the host ran out of memory and a process was killed"
        return Hypothesis(Cause.HOST_MEMORY, what, strength, reasons=(text, *reasons))
    return None


def host_memory_while_loading(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match a failure while loading without a message, where only the host can have run out."""
    if evidence.message is not None or evidence.phase is not FailurePhase.LOAD:
        return None
    what = "host copies of the checkpoint while loading"
    copies = "; ".join(_copies(evidence, needs))
    if evidence.strategy.efficient_loading:
        text = "the checkpoint was to be read into host memory by rank 0 alone"
        return likely(Cause.HOST_MEMORY, what, *filter(None, (text, copies)))
    if evidence.offloads:
        text = "what is offloaded is allocated, and pinned, in host memory"
        return likely(Cause.HOST_MEMORY, what, *filter(None, (text, copies)))
    fits = _whole_weights_fit(evidence, needs)
    if evidence.framework in (Framework.FSDP1, Framework.FSDP2) and fits:
        text = "even the whole model in 2 bytes fits a card, so the failure while loading is on the host"
        return likely(Cause.HOST_MEMORY, what, *filter(None, (text, copies)))
    return None


def _copies(evidence: Evidence, needs: Needs | None) -> list[str]:
    """Return what copies of the weights on every rank of the host take while loading."""
    if not needs or not evidence.ranks or evidence.phase is not FailurePhase.LOAD:
        return []
    total = needs.whole_weights_bytes * evidence.ranks
    return [f"a copy for each of {evidence.ranks} ranks takes {format_size(total)}"]


def _whole_weights_fit(evidence: Evidence, needs: Needs | None) -> bool | None:
    card = evidence.card_bytes
    if needs is None or card is None:
        return None
    return needs.whole_weights_bytes <= 0.9 * card


def checkpoint_gather(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match a failure while the full state dict was gathered on the device."""
    failed_clone = Note.CLONE_FAILED in evidence.log.notes
    if evidence.phase is not FailurePhase.SAVE and not failed_clone:
        return None
    if evidence.replicates:
        return None
    reasons = ["it failed while saving or resuming: the full state dict is gathered on the card"]
    whole = [c for c in evidence.candidates if c.divided_by == 1 and c.match is Match.EXACT]
    if whole:
        reasons.append(f"the request is one whole tensor: {whole[0].what}, {whole[0].dtype}")
    if evidence.log.cloned_tensor:
        reasons.append(f"the log names it: {evidence.log.cloned_tensor}")
    if needs:
        size = format_size(4 * needs.num_parameters)
        reasons.append(f"the whole model in float32 is {size} on top of the training state")
    return likely(Cause.CHECKPOINT_GATHER, "the full state dict on the card", *reasons)


def whole_model_while_loading(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match a model that was moved whole to each device before it was sharded."""
    if not _before_sharding(evidence, needs):
        return None
    if (
        evidence.ranks == 1
        or host_memory_while_loading(evidence, needs)
        or evidence.framework is None
    ):
        return None
    if evidence.message is not None and evidence.message.kind not in _DEVICE_KINDS:
        return None
    if any(c.divided_by > 1 and c.match is Match.EXACT for c in evidence.candidates):
        return None  # the request is a shard: sharding was active
    reasons = [f"it failed before {evidence.framework} could divide anything"]
    if evidence.replicates:
        reasons = ["it failed while loading, and nothing was to be divided"]
    if evidence.precision.full_eval:
        reasons.append("full_eval makes the trainer cast and move the model before wrapping it")
    if evidence.precision.bits and evidence.framework in (Framework.FSDP1, Framework.FSDP2):
        reasons.append("quantised weights go whole to each card unless their storage is a float")
    if Note.ZERO3_INIT_OFF in evidence.log.notes:
        reasons.append(f"the log says that {Note.ZERO3_INIT_OFF}")
    elif evidence.framework is Framework.ZERO3:
        reasons.append("under ZeRO-3 loading divides the model only if zero.Init is active")
    fits = evidence.replicates and _whole_weights_fit(evidence, needs) is not False
    strength = Strength.POSSIBLE if fits else Strength.LIKELY
    if needs and evidence.card_bytes:
        whole, card = needs.whole_weights_bytes, evidence.card_bytes
        reasons.append(f"the whole weights are {format_size(whole)} on {format_size(card)}")
        if (
            whole > card
            and evidence.replicates
            and (evidence.ranks or 1) > 1
            and not evidence.offloads
        ):
            strength = Strength.CERTAIN
    what = "the whole model on every card while loading"
    return Hypothesis(Cause.NOT_SHARDED, what, strength, reasons=tuple(reasons))


def _before_sharding(evidence: Evidence, needs: Needs | None) -> bool:
    """Return whether it failed with the model still whole."""
    if evidence.case.observed.sharded_units:
        return False  # a probe runs after wrapping
    if evidence.phase is FailurePhase.LOAD or evidence.precision.full_eval:
        return True
    if evidence.phase is not FailurePhase.WRAP:
        return False
    if "before" in (evidence.case.phase or "").lower():
        return True
    # Only a whole model can exceed the device while it is wrapped.
    return _whole_weights_fit(evidence, needs) is False


def unsharded_load(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match a device failure while loading where the distribution of the job is not known."""
    if evidence.phase is not FailurePhase.LOAD or evidence.framework is not None or needs is None:
        return None
    card, whole, share = evidence.card_bytes, needs.whole_weights_bytes, needs.sharded_weights_bytes
    if not card or share is None or whole <= card or share > card or evidence.ranks == 1:
        return None
    text = (
        f"the whole weights are {format_size(whole)}, more than the card's {format_size(card)}; "
        f"divided over {evidence.ranks} ranks they would be {format_size(share)}"
    )
    return likely(Cause.NOT_SHARDED, "the whole model on every card while loading", text)


def unsharded_training(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match a configuration in which every rank holds the whole model."""
    whole = evidence.replicates or evidence.framework in (Framework.ZERO1, Framework.ZERO2)
    stated = Note.DATA_PARALLEL in evidence.log.notes or Note.NO_SHARD in evidence.log.notes
    if evidence.ranks == 1 or not (whole or stated):
        return None
    if evidence.phase is FailurePhase.LOAD and Note.ZERO3_INIT_OFF not in evidence.log.notes:
        return None
    what = "every rank holds the whole model"
    reasons = ["no sharding of the parameters was configured"]
    if needs is None or evidence.card_bytes is None or needs.rank_state_bytes is None:
        several = (evidence.ranks or 1) > 1 and evidence.framework in (
            Framework.DDP,
            Framework.NONE,
        )
        return (likely if several else possible)(Cause.NOT_SHARDED, what, *reasons)
    held, card = needs.rank_state_bytes, evidence.card_bytes
    reasons.append(f"a rank then needs {format_size(held)} before any activation")
    if held <= card:
        return possible(Cause.NOT_SHARDED, what, *reasons)
    reasons.append(f"the card has {format_size(card)}")
    if needs.sharded_state_bytes:
        size = format_size(needs.sharded_state_bytes)
        reasons.append(f"divided over {evidence.ranks} ranks it would be {size}")
    alone = evidence.replicates and (evidence.ranks or 1) > 1
    impossible = alone and needs.whole_weights_bytes > card and not evidence.offloads
    strength = Strength.CERTAIN if impossible else Strength.LIKELY
    return Hypothesis(Cause.NOT_SHARDED, what, strength, reasons=tuple(reasons))


def state_beyond_card(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match a training state that is more than the device, whatever the request was."""
    found = capacity(evidence, needs)
    card = evidence.accounts.usable_bytes or evidence.card_bytes
    if found is None or needs is None or not card or not needs.rank_state_bytes:
        return None
    training = evidence.phase not in (FailurePhase.LOAD, FailurePhase.SAVE, FailurePhase.EVALUATE)
    known = evidence.framework is not None or evidence.ranks == 1
    return found if training and known and needs.rank_state_bytes > card else None


def capacity(evidence: Evidence, needs: Needs | None) -> Hypothesis | None:
    """Match a training state that, sharded as configured, fills the device."""
    card = evidence.accounts.usable_bytes or evidence.card_bytes
    if needs is None or card is None or needs.rank_state_bytes is None:
        return None
    if evidence.message is not None and evidence.message.kind not in _DEVICE_KINDS:
        return None
    unsharded = evidence.replicates and evidence.ranks != 1
    if evidence.offloads or unsharded:
        return None
    what = "the job needs more than the card has"
    least = needs.sharded_weights_bytes
    if least is not None and least > card:
        text = (
            f"even perfectly divided over {evidence.ranks} ranks the weights alone are "
            f"{format_size(least)} on {format_size(card)}"
        )
        return likely(Cause.CAPACITY, what, text)
    held = needs.rank_state_bytes
    if evidence.framework is None and evidence.ranks != 1:
        if not needs.sharded_state_bytes:
            return None  # neither ranks nor sharding are known: `remainder` leaves it open
        held = needs.sharded_state_bytes  # sharding is not known: assume the best case
    if evidence.is_inference or (evidence.phase is FailurePhase.LOAD and evidence.ranks == 1):
        return _weights_alone(needs, card)
    text = (
        f"parameters, gradients and optimizer take {format_size(held)} a rank at "
        f"{needs.bytes_per_parameter} bytes a parameter, of {format_size(card)} usable"
    )
    if state_is_small(evidence, needs, card):
        return None
    full = _FULL_WEIGHTS_SHARE if evidence.trains_adapters else _FULL_STATE_SHARE
    make = likely if held >= full * card else possible
    return make(Cause.CAPACITY, what, text)


def _weights_alone(needs: Needs, card: int) -> Hypothesis:
    """Return how far the weights fill the card: there is no gradient and no optimizer yet, or ever."""
    held = needs.sharded_weights_bytes or needs.whole_weights_bytes
    text = f"the weights take {format_size(held)} of {format_size(card)} usable"
    make = likely if held >= _FULL_WEIGHTS_SHARE * card else possible
    return make(Cause.CAPACITY, "the job needs more than the card has", text)
