"""The tensors that may have produced a printed request, and what is known of the job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TypedDict


class Match(str, Enum):
    """How well a candidate matches the request; best first."""

    EXACT = "exact"  # prints the same, and the print resolves 2 MiB
    WITHIN_ROUNDING = "within_rounding"  # prints the same, in units too coarse to be sure
    LOOSE = "loose"  # fits for some number that was not given

    __str__ = str.__str__


class Role(str, Enum):
    """The role of a candidate tensor in a training job."""

    LAYER = "layer"  # one whole transformer layer as a flat buffer
    ROOT = "root"  # everything outside the layers as a flat buffer
    MODEL = "model"  # every parameter in one buffer
    EMBEDDING = "embedding"  # embedding or output projection, or both
    PARAMETERS = "parameters"  # a buffer of parameters or state that the job's timeline names
    WEIGHT = "weight"
    FUSED_WEIGHTS = "fused_weights"  # gate and up in one tensor, as some engines load them
    LOGITS = "logits"
    SCORES = "scores"
    ACTIVATION = "activation"
    BUCKET = "bucket"  # of a collective: gradients of several tensors
    GROUP = "group"  # the weights of the attention or of the MLP of one layer together
    PACKED = "packed"  # a quantised weight

    __str__ = str.__str__


class CandidateDict(TypedDict):
    """A candidate as plain values."""

    what: str
    bytes: int
    dtype: str
    match: Match
    role: Role
    divided_by: int
    tokens: int | None
    ambiguous: bool


@dataclass(frozen=True)
class Candidate:
    """A tensor that would have produced the printed request.

    `divided_by` is the number of ranks that share it: 1 for a whole tensor. `tokens` is set where
    it depends on the tokens of a rank, solved from the number where they were not given.
    """

    role: Role
    what: str
    size_bytes: int
    dtype: str
    match: Match = Match.LOOSE
    divided_by: int = 1
    tokens: int | None = None
    ambiguous: bool = False

    def to_dict(self) -> CandidateDict:
        """Return the candidate as plain values."""
        return {
            "what": self.what,
            "bytes": self.size_bytes,
            "dtype": self.dtype,
            "match": self.match,
            "role": self.role,
            "divided_by": self.divided_by,
            "tokens": self.tokens,
            "ambiguous": self.ambiguous,
        }


@dataclass(frozen=True)
class Workload:
    """The facts about a job that matching uses; None where not known."""

    ranks: int | None = None
    micro_batch: int | None = None
    sequence_length: int | None = None
    zero: bool = False
    replicates: bool = False  # DDP: gradients are reduced in buckets of whole tensors
    bits: int | None = None  # 4 or 8 where weights are stored quantised
    trains_all: bool = True  # not only adapters: only then has every parameter a gradient
    vocab_size: int | None = None  # where no shape is known
    num_parameters: int | None = None
    hidden_size: int | None = None  # where no shape is known
