"""Rules for the probe, the message, the warnings and the request, each taken by itself."""

from __future__ import annotations

import re

from services.shared.memory.forensics.diagnosis import Cause, Hypothesis, likely, possible
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import FailurePhase
from services.shared.memory.forensics.matching.candidates import Match, Role
from services.shared.memory.oom_log.message_formats import MessageKind
from services.shared.memory.oom_log.message_parser import excerpt
from services.shared.memory.oom_log.traceback_sites import Note, Site
from services.shared.memory.recipe import Precision
from services.shared.memory.sizes import GIB, format_size

# Free memory above the request by this factor, or by a gibibyte, is not a shortage.
_PLENTY = 4


# Cached but unallocated bytes above this share of the card point to fragmentation: in 24 of 33
# public messages they exceed the request with an ordinary cause, in the fragmented ones the share
# was 0.10 to 0.36 (2026-11).
_FRAGMENTED_SHARE = 0.10
# Below this share what is cached is the rest of segments, as in any job.
_ORDINARY_SHARE = 0.02
# Of a card, beyond the usual context: what does not explain a failure by itself.
_ORDINARY_OUTSIDE = 0.03


def probe_found_single_unit(evidence: Evidence) -> Hypothesis | None:
    """Match a probe that found one unit for the whole model."""
    layers = evidence.shape.num_layers if evidence.shape else 2
    if evidence.case.observed.sharded_units != 1 or layers < 2:
        return None
    text = "the probe found a single sharded unit: the whole model is gathered at once"
    return likely(Cause.WRAP_TOO_COARSE, "one unit for the whole model", text)


def driver_refusal(evidence: Evidence) -> Hypothesis | None:
    """Match a refusal by the driver, below torch or with memory free."""
    message = evidence.message
    if message is None:
        return None
    if message.kind is MessageKind.DRIVER:
        text = f"the driver refused below torch's allocator: {excerpt(message.text, 0, 100)}"
        if evidence.offloads or Site.PINNING in evidence.sites:
            more = "with offloading such a message usually means pinned host memory, not the card"
            return likely(Cause.PINNED_MEMORY, "pinned host memory or its limit", text, more)
        if message.format_id == "X3" and "OUT_OF_RESOURCES" in message.text:
            return likely(Cause.DRIVER_LIMIT, "a driver-level limit", text)
        return possible(Cause.DRIVER_LIMIT, "a driver-level limit", text)
    return _driver_with_memory_free(evidence)


def _driver_with_memory_free(evidence: Evidence) -> Hypothesis | None:
    accounts = evidence.accounts
    free, requested = accounts.free_bytes, accounts.requested_bytes
    if not free or not requested or free < requested or accounts.allowed_bytes:
        return None
    plenty = free >= max(_PLENTY * requested, requested + GIB)
    text = f"{format_size(requested)} were refused with {format_size(free)} free on the card"
    more = "that is not a shortage of memory" if plenty else "the refusal is not explained by size"
    make = likely if plenty else possible
    return make(Cause.DRIVER_LIMIT, "the driver refused with memory free", text, more)


def outside_allocator(evidence: Evidence) -> Hypothesis | None:
    """Match memory that collectives use outside of torch's allocator."""
    message = evidence.message
    if message is not None and message.kind is MessageKind.COLLECTIVE:
        text = f"a collective or library could not allocate: {excerpt(message.text, 0, 100)}"
        return likely(Cause.OUTSIDE_ALLOCATOR, "buffers outside torch's allocator", text)
    if evidence.strategy.integer_reshard:
        text = (
            "an integer reshard_after_forward makes process groups for every unit, each with "
            "collective buffers of its own outside torch's allocator"
        )
        return likely(Cause.OUTSIDE_ALLOCATOR, "a communicator for every unit", text)
    return None


def device_mostly_foreign(evidence: Evidence) -> Hypothesis | None:
    """Match a device of which other processes hold more than torch does."""
    found = _foreign_memory(evidence)
    accounts = evidence.accounts
    held = (accounts.allocated_bytes or 0) + (accounts.cached_bytes or 0)
    if found is None or accounts.foreign_bytes < held:
        return None
    return found


def device_partly_foreign(evidence: Evidence) -> Hypothesis | None:
    """Match a device of which other processes hold enough for the request."""
    return None if device_mostly_foreign(evidence) else _foreign_memory(evidence)


def _foreign_memory(evidence: Evidence) -> Hypothesis | None:
    accounts = evidence.accounts
    foreign = accounts.foreign_bytes
    if not foreign or foreign < (accounts.requested_bytes or 0):
        return None
    text = (
        f"{format_size(foreign)} of the card are neither held by torch, nor free, nor the usual context "
        "and collective buffers"
    )
    known = accounts.other_processes_bytes is not None and accounts.other_processes_bytes >= GIB
    held = (accounts.allocated_bytes or 0) + (accounts.cached_bytes or 0)
    if known or held < foreign:
        return likely(Cause.OTHER_PROCESS, "another process on the card", text)
    more = (
        "the message does not tell whether collectives of this process or another process hold it"
    )
    # Several communicators and captured graphs hold a few percent of a card in jobs that fail otherwise.
    ordinary = foreign < _ORDINARY_OUTSIDE * (accounts.total_bytes or 0)
    make = possible if ordinary else likely
    return make(Cause.OUTSIDE_ALLOCATOR, "memory outside torch's allocator", text, more)


def float32_upcast(evidence: Evidence) -> Hypothesis | None:
    """Match parameters that were upcast to float32."""
    what = "parameters upcast to float32"
    if Note.UPCAST in evidence.log.notes:
        return likely(Cause.FP32_UPCAST, what, f"the log says that {Note.UPCAST}")
    observed = evidence.case.observed.dtypes
    planned = evidence.case.parameters
    if "float32" in observed and planned not in (None, Precision.FLOAT32):
        text = f"the probe found float32 parameters where {planned} was planned"
        return likely(Cause.FP32_UPCAST, what, text)
    words = f"{evidence.case.free_text} {evidence.case.optimizer or ''}".lower()
    if "upcast" in words or re.search(
        r"cast\w{0,8} (?:\w{1,30} ){0,4}(?:to|into) (?:fp32|float32)", words
    ):
        return likely(Cause.FP32_UPCAST, what, "the case itself mentions an upcast")
    wrapping = evidence.phase is FailurePhase.WRAP and not evidence.precision.full_eval
    requested = Precision.FLOAT32 in (evidence.case.parameters, evidence.precision.parameters)
    if wrapping and evidence.precision.mixed and evidence.shards_parameters and not requested:
        text = "mixed precision upcasts parameters to float32 when the model is wrapped"
        return likely(Cause.FP32_UPCAST, what, text)
    return None


def mixed_unit_warning(evidence: Evidence) -> Hypothesis | None:
    """Match the warning that a unit mixes frozen and trainable parameters."""
    if Note.MIXED_REQUIRES_GRAD not in evidence.log.notes:
        return None
    text = "a unit with frozen and trainable parameters keeps a gradient buffer for all of them"
    return likely(Cause.WRAP_TOO_COARSE, "frozen and trainable parameters in one unit", text)


_NO_LAYERS = re.compile(
    r"^\s*(?:none|no\b|missing|not set|root)|no_wrap|no (?:auto[_ -]?)?wrap|root[ -]only"
    r"|(?:whole|entire) model|(?:single|one) (?:flat )?unit",
    re.IGNORECASE,
)


def single_unit_policy(evidence: Evidence) -> Hypothesis | None:
    """Match a stated wrap policy that makes the model one unit."""
    stated = evidence.case.wrap_policy or ""
    if not evidence.shards_parameters or not _NO_LAYERS.search(stated):
        return None
    text = f"the wrap policy is {stated[:60]!r}: the whole model is gathered at once"
    return likely(Cause.WRAP_TOO_COARSE, "one unit for the whole model", text)


def evaluation_outputs(evidence: Evidence) -> Hypothesis | None:
    """Match a failure in evaluation, where only outputs accumulate, or in generation."""
    if evidence.phase is not FailurePhase.EVALUATE:
        return None
    words = (evidence.case.phase or "").lower()
    generating = re.search(r"generat|infer|rollout", words) or Site.GENERATING in evidence.sites
    if Site.EVALUATING not in evidence.sites and generating:
        text = "generation keeps keys and values of every token, and logits of the prompt"
        return possible(Cause.LOGITS_OR_ACTIVATIONS, "cache and logits of generation", text)
    text = "evaluation keeps no gradients: what grows there are logits gathered on the card"
    return likely(Cause.LOGITS_OR_ACTIVATIONS, "outputs kept while evaluating", text)


def activations(evidence: Evidence) -> Hypothesis | None:
    """Match a request that is an activation, not a weight."""
    requested, total = evidence.accounts.requested_bytes, evidence.card_bytes
    if requested is None or evidence.phase in (FailurePhase.LOAD, FailurePhase.WRAP):
        return None
    if evidence.message is not None and evidence.message.format_id == "X4":
        return None  # refused for being one block, whatever it is
    weights = [c for c in evidence.candidates if c.role not in _ACTIVATIONS]
    mine = [c for c in evidence.candidates if c.role in _ACTIVATIONS]
    reasons = [f"it may be {c.what} in {c.dtype}: {format_size(c.size_bytes)}" for c in mine[:1]]
    if total and requested > total and not weights:
        text = f"one tensor of {format_size(requested)} is larger than the card, and no weight is"
        what = "a single activation larger than the card"
        return likely(Cause.LOGITS_OR_ACTIVATIONS, what, text, *reasons)
    what = "logits, scores or other activations"
    sure_weights = [c for c in weights if c.match is not Match.LOOSE]
    at_loss = Site.LOSS in evidence.sites or Site.ATTENTION in evidence.sites
    if at_loss and not [c for c in sure_weights if c.match is Match.EXACT]:
        text = "it failed in the loss or the attention, where activations are made, not weights"
        return likely(Cause.LOGITS_OR_ACTIVATIONS, what, text, *reasons)
    given = [c for c in mine if c.match is not Match.LOOSE]
    if given and not sure_weights:
        text = f"the request is {given[0].what}, {given[0].dtype}; no weight has this size"
        return likely(Cause.LOGITS_OR_ACTIVATIONS, what, text)
    if mine and not weights and requested >= GIB and evidence.phase is not None:
        text = f"{format_size(requested)} at once, which no weight of the model takes"
        in_training_step = evidence.phase in (FailurePhase.FORWARD, FailurePhase.BACKWARD)
        make = likely if in_training_step else possible
        return make(Cause.LOGITS_OR_ACTIVATIONS, what, text, *reasons)
    return None


ROOT_GATHERED = "embedding or head gathered with the root unit"
_ACTIVATIONS = (Role.LOGITS, Role.SCORES, Role.ACTIVATION)


def coarse_unit_request(evidence: Evidence) -> Hypothesis | None:
    """Match a request that is a unit larger than a layer."""
    if evidence.phase in (FailurePhase.LOAD, FailurePhase.SAVE):
        return None
    sure = [c for c in evidence.candidates if c.match is not Match.LOOSE and c.divided_by == 1]
    model = [c for c in sure if c.role is Role.MODEL]
    if model:
        text = f"the request is {model[0].what}, {model[0].dtype}: the model is one unit"
        return likely(Cause.WRAP_TOO_COARSE, "one unit for the whole model", text)
    root = [c for c in sure if c.role in (Role.ROOT, Role.EMBEDDING) and not c.ambiguous]
    if not root or not evidence.shards_parameters or len(root) < len(sure):
        return None
    text = f"the request is the gathered {root[0].what}, {root[0].dtype}, which no layer covers"
    return likely(Cause.WRAP_TOO_COARSE, ROOT_GATHERED, text)


def optimizer_temporaries(evidence: Evidence) -> Hypothesis | None:
    """Match a failure in the optimizer step."""
    if evidence.phase is not FailurePhase.OPTIMIZER_STEP and Site.FOREACH not in evidence.sites:
        return None
    state_words = re.search(
        r"optimi[sz]er[\s_.]?(?:init|state)", (evidence.case.phase or "").lower()
    )
    if (Site.STATE in evidence.sites or state_words) and Site.FOREACH not in evidence.sites:
        text = "it failed while the optimizer's state was created: that stays, it is no temporary"
        return likely(Cause.CAPACITY, "no room for the optimizer's state", text)
    reasons = ["it failed in the optimizer's step"]
    if Site.FOREACH in evidence.sites:
        reasons.append("in a list operation, which makes a temporary of the whole local shard")
    shares = [c for c in evidence.candidates if c.divided_by > 1 and c.match is Match.EXACT]
    if shares:
        reasons.append(f"the request is {shares[0].what}, {shares[0].dtype}")
    return likely(Cause.OPTIMIZER_TEMPORARIES, "temporaries of the update", *reasons)


def fragmentation(evidence: Evidence) -> Hypothesis | None:
    """Match free memory in the allocator that would suffice if it were contiguous."""
    accounts = evidence.accounts
    cached, requested, total = accounts.cached_bytes, accounts.requested_bytes, accounts.total_bytes
    if (
        not cached
        or not requested
        or not total
        or cached + (accounts.free_bytes or 0) < requested
        or cached < _ORDINARY_SHARE * total
        or not accounts.fits_if_defragmented
    ):
        return None
    text = (
        f"{format_size(cached)} are free inside the allocator and "
        f"{format_size(accounts.free_bytes or 0)} on the card, together more than the "
        f"{format_size(requested)} requested: packed together everything would fit"
    )
    make = likely if cached >= _FRAGMENTED_SHARE * total else possible
    return make(Cause.FRAGMENTATION, "no single free block is large enough", text)
