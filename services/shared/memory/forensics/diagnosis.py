"""The answer: what failed, why, whether sharding was on, and what to change."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from services.shared.memory.forensics.device_accounts import Accounts
from services.shared.memory.forensics.request_matching import Candidate
from services.shared.memory.oom_log.message_parser import Message


class Cause(str, Enum):
    """Why a job ran out of memory."""

    NOT_SHARDED = "not_sharded"
    CAPACITY = "capacity"
    OPTIMIZER_TEMPORARIES = "optimizer_temporaries"
    FP32_UPCAST = "fp32_upcast"
    WRAP_TOO_COARSE = "wrap_too_coarse"
    LOGITS_OR_ACTIVATIONS = "logits_or_activations"
    CHECKPOINT_GATHER = "checkpoint_gather"
    FRAGMENTATION = "fragmentation"
    OUTSIDE_ALLOCATOR = "outside_allocator"
    HOST_MEMORY = "host_memory"
    DRIVER_LIMIT = "driver_limit"
    OTHER_PROCESS = "other_process"
    UNDECIDED = "undecided"

    __str__ = str.__str__


class Confidence(str, Enum):
    """How sure a diagnosis is; certain only where arithmetic excludes everything else."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNDECIDED = "undecided"

    __str__ = str.__str__


class Sharded(str, Enum):
    """Whether each rank held only its share of the parameters."""

    YES = "yes"
    NO = "no"
    PARTLY = "partly"
    UNKNOWN = "unknown"

    __str__ = str.__str__


class Strength(int, Enum):
    """How far the evidence carries one explanation."""

    EXCLUDED = 0
    POSSIBLE = 1
    LIKELY = 2
    CERTAIN = 3


@dataclass(frozen=True)
class Hypothesis:
    """One explanation: what it predicts for the message, what speaks for it and against it."""

    cause: Cause
    what: str
    strength: Strength
    predicted_allocated_bytes: int | None = None
    predicted_request_bytes: int | None = None
    reasons: tuple[str, ...] = ()
    objections: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()  # per rank and micro-batch, solved where they were not given
    step: int | None = None
    where: str = ""  # the moment of the prediction: step, direction, layer

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the contract; `status` says whether it survived."""
        return {
            "cause": str(self.cause),
            "what": self.what,
            "status": self.strength.name.lower(),
            "predicted_allocated_bytes": self.predicted_allocated_bytes,
            "predicted_request_bytes": self.predicted_request_bytes,
            "for": list(self.reasons),
            "against": list(self.objections),
            "tokens_per_rank": list(self.tokens),
            "step": self.step,
            "where": self.where,
        }


def possible(cause: Cause, what: str, *reasons: str) -> Hypothesis:
    """Return an explanation that something speaks for."""
    return Hypothesis(cause, what, Strength.POSSIBLE, reasons=reasons)


def likely(cause: Cause, what: str, *reasons: str) -> Hypothesis:
    """Return an explanation that the evidence points to."""
    return Hypothesis(cause, what, Strength.LIKELY, reasons=reasons)


def certain(cause: Cause, what: str, *reasons: str) -> Hypothesis:
    """Return an explanation that leaves no room for another."""
    return Hypothesis(cause, what, Strength.CERTAIN, reasons=reasons)


@dataclass(frozen=True)
class ProposedRemedy:
    """A change, the peak it leads to per rank, whether that fits, and what it costs."""

    change: str
    predicted_peak_bytes: int | None
    verdict: str
    costs: str
    changes: dict[str, Any] = field(default_factory=dict)
    one_rank_less: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields of the contract."""
        return {
            "change": self.change,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "verdict": self.verdict,
            "costs": self.costs,
            "changes": self.changes,
            "one_rank_less": self.one_rank_less,
        }


@dataclass(frozen=True)
class Diagnosis:
    """What a failure was, with its evidence."""

    cause: Cause
    confidence: Confidence
    sharded: Sharded
    sharded_evidence: tuple[str, ...] = ()
    summary: str = ""
    message: Message | None = None
    accounts: Accounts = field(default_factory=Accounts)
    request: tuple[Candidate, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    next_measurement: str | None = None
    remedies: tuple[ProposedRemedy, ...] = ()
    notes: tuple[str, ...] = ()
    needs: dict[str, Any] = field(default_factory=dict)  # what the job needs by arithmetic

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain JSON values, field names as in the contract."""
        return {
            "cause": str(self.cause),
            "confidence": str(self.confidence),
            "sharded": str(self.sharded),
            "sharded_evidence": list(self.sharded_evidence),
            "summary": self.summary,
            "message": _message_json(self.message, self.accounts),
            "request": [candidate.to_json() for candidate in self.request],
            "hypotheses": [hypothesis.to_json() for hypothesis in self.hypotheses],
            "next_measurement": self.next_measurement,
            "remedies": [remedy.to_json() for remedy in self.remedies],
            "notes": list(self.notes),
            "needs": self.needs,
        }


def _message_json(message: Message | None, accounts: Accounts) -> dict[str, Any] | None:
    if message is None:
        return None
    printed = {
        "requested_bytes": message.requested,
        "total_bytes": message.total,
        "allocated_bytes": message.allocated,
        "reserved_bytes": message.reserved,
        "reserved_unallocated_bytes": message.unallocated,
        "free_bytes": message.free,
        "process_bytes": message.process,
        "allowed_bytes": message.allowed,
        "private_pools_bytes": message.private_pools,
        "active_bytes": message.active,
    }
    return {
        "format": message.format_id,
        "kind": str(message.kind),
        "backend": str(message.backend),
        **{name: size.size_bytes if size else None for name, size in printed.items()},
        "other_processes_bytes": [other.size_bytes for other in message.others],
        "outside_torch_bytes": accounts.outside_bytes,
        "device_index": message.device_index,
        "rank": message.rank,
        "text": message.text,
    }
