"""The diagnosis of a memory failure, and its form as plain values.

The field names of the `*Dict` types are a contract: the CLI prints them, `POST /diagnoses` answers
with them, and they are stored with the job.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypedDict

from services.shared.memory.forensics.device_accounts import Accounts
from services.shared.memory.forensics.matching.candidates import Candidate, CandidateDict
from services.shared.memory.forensics.state_size import (
    Needs,
    NeedsDict,
    PlannedPeaks,
    PlannedPeaksDict,
)
from services.shared.memory.oom_log.message_formats import Backend, MessageKind
from services.shared.memory.oom_log.message_parser import Message, bytes_of
from services.shared.memory.planning.plan_contract import Verdict


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
    OWN_RANKS_ON_CARD = "own_ranks_on_card"
    SHARED_MEMORY = "shared_memory"
    SERVING_START_UP = "serving_start_up"
    NOT_DEVICE_MEMORY = "not_device_memory"
    PINNED_MEMORY = "pinned_memory"
    UNDECIDED = "undecided"

    __str__ = str.__str__


class Confidence(str, Enum):
    """How certain a diagnosis is; `certain` only where arithmetic excludes everything else."""

    CERTAIN = "certain"
    LIKELY = "likely"
    UNDECIDED = "undecided"

    __str__ = str.__str__


class Sharded(str, Enum):
    """Whether each rank held only its shard of the parameters."""

    YES = "yes"
    NO = "no"
    PARTLY = "partly"
    UNKNOWN = "unknown"

    __str__ = str.__str__


class Strength(int, Enum):
    """How strongly the evidence supports one hypothesis."""

    EXCLUDED = 0
    POSSIBLE = 1
    LIKELY = 2
    CERTAIN = 3


# The functional form, since `for` is a keyword of Python.
HypothesisDict = TypedDict(
    "HypothesisDict",
    {
        "cause": Cause,
        "what": str,
        "status": str,
        "predicted_allocated_bytes": int | None,
        "predicted_request_bytes": int | None,
        "for": list[str],
        "against": list[str],
        "tokens_per_rank": list[int],
        "step": int | None,
        "where": str,
    },
)


@dataclass(frozen=True)
class Hypothesis:
    """One explanation: what it predicts for the message, and the evidence for and against it."""

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

    def to_dict(self) -> HypothesisDict:
        """Return the hypothesis as plain values; `status` is its strength."""
        return {
            "cause": self.cause,
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
    """Return a hypothesis with some evidence for it."""
    return Hypothesis(cause, what, Strength.POSSIBLE, reasons=reasons)


def likely(cause: Cause, what: str, *reasons: str) -> Hypothesis:
    """Return a hypothesis that the evidence points to."""
    return Hypothesis(cause, what, Strength.LIKELY, reasons=reasons)


def certain(cause: Cause, what: str, *reasons: str) -> Hypothesis:
    """Return a hypothesis that excludes every other."""
    return Hypothesis(cause, what, Strength.CERTAIN, reasons=reasons)


RecipeChanges = dict[str, str | int | bool | None]  # fields of a recipe, and their new values


class Launcher(str, Enum):
    """Where a line is pasted."""

    ENVIRONMENT = "environment"
    SHELL = "shell"
    TORCHRUN = "torchrun"
    ACCELERATE = "accelerate"  # its YAML
    DEEPSPEED = "deepspeed"  # an object to merge into its JSON
    TRANSFORMERS = "transformers"  # arguments of its Trainer
    PYTHON = "python"  # the training script
    DOCKER = "docker"  # options of `docker run`
    COMPOSE = "compose"
    KUBERNETES = "kubernetes"
    SLURM = "slurm"
    VLLM = "vllm"
    SGLANG = "sglang"

    __str__ = str.__str__


class LauncherLineDict(TypedDict):
    """A line to paste, and where."""

    launcher: Launcher
    line: str


@dataclass(frozen=True)
class LauncherLine:
    """One line that makes a change, in the form that a launcher takes."""

    launcher: Launcher
    line: str

    def to_dict(self) -> LauncherLineDict:
        """Return the line as plain values."""
        return {"launcher": self.launcher, "line": self.line}


class FewerRanksDict(TypedDict):
    """What a remedy comes to on one rank less."""

    ranks: int
    predicted_peak_bytes: int
    verdict: Verdict


class _RequiredRemedyDict(TypedDict):
    change: str
    predicted_peak_bytes: int | None
    verdict: Verdict
    costs: str
    changes: RecipeChanges


class RemedyDict(_RequiredRemedyDict, total=False):
    """A remedy as plain values; `changes` can be sent with a retry as they are."""

    # Both are absent where the remedy is from the plan of a job of ours.
    one_rank_less: FewerRanksDict | None
    lines: list[LauncherLineDict]


@dataclass(frozen=True)
class FewerRanks:
    """The peak and the verdict of a remedy on one rank less."""

    ranks: int
    predicted_peak_bytes: int
    verdict: Verdict

    def to_dict(self) -> FewerRanksDict:
        """Return the prediction as plain values."""
        return {
            "ranks": self.ranks,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Remedy:
    """A change, the peak per rank after it, whether that fits, what it costs, and lines to paste.

    Each of `lines` makes the change in one launcher; the first is for the job's own where that is known.
    """

    change: str
    predicted_peak_bytes: int | None
    verdict: Verdict
    costs: str
    changes: RecipeChanges = field(default_factory=dict)
    one_rank_less: FewerRanks | None = None
    lines: tuple[LauncherLine, ...] = ()

    def to_dict(self) -> RemedyDict:
        """Return the remedy as plain values."""
        return {
            "change": self.change,
            "predicted_peak_bytes": self.predicted_peak_bytes,
            "verdict": self.verdict,
            "costs": self.costs,
            "changes": self.changes,
            "one_rank_less": self.one_rank_less.to_dict() if self.one_rank_less else None,
            "lines": [line.to_dict() for line in self.lines],
        }


class MessageDict(TypedDict):
    """The failure message as plain values; a number that was not printed is None."""

    format: str
    kind: MessageKind
    backend: Backend
    requested_bytes: int | None
    total_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    reserved_unallocated_bytes: int | None
    free_bytes: int | None
    process_bytes: int | None
    allowed_bytes: int | None
    private_pools_bytes: int | None
    active_bytes: int | None
    other_processes_bytes: list[int]
    outside_torch_bytes: int | None
    device_index: int | None
    rank: int | None
    text: str


class NeedsAndPeaksDict(NeedsDict, PlannedPeaksDict):
    """What the job needs by arithmetic, and what its plan predicts; empty where neither is known."""


class DiagnosisDict(TypedDict):
    """A diagnosis as plain values."""

    cause: Cause
    confidence: Confidence
    sharded: Sharded
    sharded_evidence: list[str]
    summary: str
    message: MessageDict | None
    request: list[CandidateDict]
    hypotheses: list[HypothesisDict]
    next_measurement: str | None
    remedies: list[RemedyDict]
    notes: list[str]
    needs: NeedsAndPeaksDict


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a memory failure, with its evidence."""

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
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()
    needs: Needs | None = None
    planned: PlannedPeaks | None = None

    def to_dict(self) -> DiagnosisDict:
        """Return the diagnosis as plain values that serialise to JSON."""
        return {
            "cause": self.cause,
            "confidence": self.confidence,
            "sharded": self.sharded,
            "sharded_evidence": list(self.sharded_evidence),
            "summary": self.summary,
            "message": _message_dict(self.message, self.accounts),
            "request": [candidate.to_dict() for candidate in self.request],
            "hypotheses": [hypothesis.to_dict() for hypothesis in self.hypotheses],
            "next_measurement": self.next_measurement,
            "remedies": [remedy.to_dict() for remedy in self.remedies],
            "notes": list(self.notes),
            "needs": _needs_dict(self.needs, self.planned),
        }


def _needs_dict(needs: Needs | None, planned: PlannedPeaks | None) -> NeedsAndPeaksDict:
    counted: NeedsDict = needs.to_dict() if needs else {}
    predicted: PlannedPeaksDict = planned.to_dict() if planned else {}
    return {**counted, **predicted}


def _message_dict(message: Message | None, accounts: Accounts) -> MessageDict | None:
    if message is None:
        return None
    return {
        "format": message.format_id,
        "kind": message.kind,
        "backend": message.backend,
        "requested_bytes": bytes_of(message.requested),
        "total_bytes": bytes_of(message.total),
        "allocated_bytes": bytes_of(message.allocated),
        "reserved_bytes": bytes_of(message.reserved),
        "reserved_unallocated_bytes": bytes_of(message.unallocated),
        "free_bytes": bytes_of(message.free),
        "process_bytes": bytes_of(message.process),
        "allowed_bytes": bytes_of(message.allowed),
        "private_pools_bytes": bytes_of(message.private_pools),
        "active_bytes": bytes_of(message.active),
        "other_processes_bytes": [other.size_bytes for other in message.others],
        "outside_torch_bytes": accounts.outside_bytes,
        "device_index": message.device_index,
        "rank": message.rank,
        "text": message.text,
    }
