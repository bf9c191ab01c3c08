"""Rules for messages whose text alone names the component that ran out."""

from __future__ import annotations

import re

from services.shared.memory.forensics.diagnosis import (
    Cause,
    Hypothesis,
    Strength,
    likely,
    possible,
)
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import FailurePhase, Framework
from services.shared.memory.oom_log.formats.serving import CACHE_FULL, CARD_IN_USE
from services.shared.memory.oom_log.message_formats import Backend, MessageKind
from services.shared.memory.oom_log.message_parser import excerpt
from services.shared.memory.oom_log.traceback_sites import Note, Site
from services.shared.memory.sizes import GIB, format_size

# Contexts of idle ranks on one card are alike to a few percent: the same libraries were loaded.
_ALIKE = 0.05
# A context with its libraries and collectives; more than this is another job.
_LARGEST_CONTEXT = 4 * GIB
_MPS_FULL = 0.9  # of the watermark
_SERVERS = re.compile(r"\b(?:vllm|sglang|lmdeploy|tgi|text-generation-inference)\b", re.IGNORECASE)
_OF_THE_DEVICE = (MessageKind.ALLOCATOR, MessageKind.PROSE, MessageKind.DRIVER)


def named_component(evidence: Evidence) -> Hypothesis | None:
    """Match /dev/shm, on-chip memory, pinned host memory and a server's start."""
    message = evidence.message
    if message is None:
        return None
    text = f"the message says: {excerpt(message.text, 0, 120)}"
    if message.kind is MessageKind.SHARED_MEMORY:
        what = "/dev/shm is too small: containers limit it to 64 MiB unless told otherwise"
        return likely(Cause.SHARED_MEMORY, what, text)
    if message.kind is MessageKind.ON_CHIP:
        what = "a kernel needs more on-chip memory than one multiprocessor has"
        return likely(Cause.NOT_DEVICE_MEMORY, what, text, "the card's memory is not involved")
    if message.kind is MessageKind.PINNED_HOST:
        more = "locked host memory was refused, though the text names the card"
        return likely(Cause.PINNED_MEMORY, "pinned host memory or its limit", text, more)
    if message.kind is MessageKind.SERVING:
        return _serving(evidence, text)
    return None


def _serving(evidence: Evidence, text: str) -> Hypothesis:
    accounts, message = evidence.accounts, evidence.message
    if message is not None and message.format_id == CARD_IN_USE:
        what = "other processes used the card while the server started"
        return likely(Cause.OTHER_PROCESS, what, text)
    if message is not None and message.format_id == CACHE_FULL:
        what = "the server's cache has no room for the prompts of one batch"
        return likely(Cause.SERVING_START_UP, what, text)
    if accounts.free_bytes is None or accounts.total_bytes is None:
        what = "weights and warm-up of the server leave too little for its cache"
        return likely(Cause.SERVING_START_UP, what, text)
    used = format_size(max(0, accounts.total_bytes - accounts.free_bytes))
    what = "the card was in use when the server started"
    return likely(Cause.OTHER_PROCESS, what, f"{used} of the card were taken before", text)


def server_start(evidence: Evidence) -> Hypothesis | None:
    """Match a card that filled while an inference server loaded, profiled or reserved its cache."""
    message = evidence.message
    if message is None or not _server_starts(evidence):
        return None
    if message.kind not in _OF_THE_DEVICE or evidence.accounts.foreign_bytes:
        return None
    what = "weights, warm-up and cache of the server take more than the card"
    text = "it failed while the server loaded its weights, profiled or reserved its cache"
    return likely(Cause.SERVING_START_UP, what, text)


def _server_starts(evidence: Evidence) -> bool:
    """Return whether a server was starting: by the traceback, or by its name without any training."""
    if Site.SERVER_START in evidence.sites:
        return True
    stated = _SERVERS.search(evidence.case.free_text)
    trains = Site.BACKWARD in evidence.sites or evidence.finished_steps > 0
    serves = bool(stated) or Note.INFERENCE_SERVER in evidence.log.notes
    return serves and not trains and evidence.phase is not FailurePhase.EVALUATE


def own_ranks_on_card(evidence: Evidence) -> Hypothesis | None:
    """Match several processes of one small size on the card: contexts of the job's own ranks."""
    message = evidence.message
    if message is None or len(message.others) < 2:
        return None
    sizes = sorted(other.size_bytes for other in message.others)
    middle = sizes[len(sizes) // 2]
    alike = [size for size in sizes if abs(size - middle) <= _ALIKE * middle]
    ranks = evidence.ranks
    if len(alike) < 2 or not 0 < middle <= _LARGEST_CONTEXT:
        return None
    if ranks is not None and len(alike) > ranks:
        return None
    text = (
        f"{len(alike)} other processes hold {format_size(middle)} each, as contexts of "
        f"{f'the other {ranks} ranks' if ranks is None else f'a job of {ranks} ranks'} do"
    ).replace("the other None ranks", "other ranks")
    what = "other ranks of this job opened a context on this card"
    held = (message.allocated.size_bytes if message.allocated else 0) or 1
    requested = message.requested.size_bytes if message.requested else 0
    decisive = sum(alike) >= requested and (ranks is None or len(alike) == ranks - 1)
    make = likely if decisive and sum(alike) <= held else possible
    return make(Cause.OWN_RANKS_ON_CARD, what, text)


def checkpoint_on_the_first_card(evidence: Evidence) -> Hypothesis | None:
    """Match a checkpoint that each rank reads to the card it was saved from, mostly the first."""
    words = (evidence.case.phase or "").lower()
    reads = Site.UNPICKLING in evidence.sites or "torch.load" in words
    if not reads or evidence.ranks == 1 or evidence.framework is Framework.NONE:
        return None
    text = (
        "torch.load without map_location puts tensors on the card they were saved from: all ranks' "
        "copies are on the first one"
    )
    return possible(Cause.OWN_RANKS_ON_CARD, "every rank reads the checkpoint to one card", text)


def mps_watermark(evidence: Evidence) -> Hypothesis | None:
    """Match Apple's limit, which counts torch's allocations and all others together."""
    message = evidence.message
    if message is None or message.backend is not Backend.MPS or not message.allowed:
        return None
    limit = message.allowed.size_bytes
    allocated = message.allocated.size_bytes if message.allocated else 0
    others = sum(other.size_bytes for other in message.others)
    if others > allocated and others >= limit // 2:
        text = f"{format_size(others)} of {format_size(limit)} allowed are other allocations"
        what = "memory outside torch's allocator"
        return likely(Cause.OUTSIDE_ALLOCATOR, what, text)
    if allocated >= _MPS_FULL * limit:
        text = f"torch holds {format_size(allocated)} of {format_size(limit)} allowed"
        return likely(Cause.CAPACITY, "the job needs more than the device allows", text)
    return None


def single_block_limit(evidence: Evidence) -> Hypothesis | None:
    """Match a driver that refuses one block beyond a size, beside the device's capacity."""
    message = evidence.message
    if message is None or message.format_id != "X4":
        return None
    asked = format_size(message.requested.size_bytes) if message.requested else "the request"
    text = f"the driver refuses a single block of {asked}, whatever is free"
    return possible(Cause.DRIVER_LIMIT, "a limit on the size of one block", text)


def larger_than_the_device(evidence: Evidence) -> Hypothesis | None:
    """Match a single request beyond all of the device's memory."""
    accounts, message = evidence.accounts, evidence.message
    requested, total = accounts.requested_bytes, accounts.total_bytes
    if message is None or not requested or not total or message.format_id != "X4":
        return None
    if requested <= total:
        return None
    text = f"{format_size(requested)} at once are more than the device's {format_size(total)}"
    return possible(Cause.CAPACITY, "one tensor larger than the device", text)


def counted_kill(evidence: Evidence) -> bool:
    """Return whether a kill is counted as one for memory by who did it."""
    message = evidence.message
    return (
        message is not None
        and message.kind is MessageKind.KILLED
        and any(word in message.text for word in _COUNTED_WORDS)
    )


_COUNTED_WORDS = (
    "oom_kill",
    "oom-kill",
    "OOMKilled",
    "Out of memory: Kill",
    "memory pressure",
    "running low on memory",
    "xceeded memory limit",
    "job memory limit",
    "step memory limit",
    "resource: memory",
    "MEMLIMIT",
    "out-of-memory handler",
    "all available RAM",
    ": Out Of Memory",
    "OUT_OF_ME",
    "systemd-oomd",
    "by the OOM killer",
    "job killed: mem",
    "job killed: vmem",
    "more memory than is available",
)


def kill_strength(evidence: Evidence) -> Strength:
    """Return how strongly a kill points to host memory."""
    return Strength.CERTAIN if counted_kill(evidence) else Strength.LIKELY
