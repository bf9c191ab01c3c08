"""What a training job needs by counting bytes per parameter, before any activation.

This is the arithmetic that holds for every framework, ours or not; the plan refines it where the
recipe is one that it models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict

from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import FailurePhase, Framework
from services.shared.memory.planning.ledger import PlanPhase
from services.shared.memory.planning.plan_contract import Verdict
from services.shared.memory.recipe import Optimizer, OptimizerImpl, Precision

# DeepSpeed, runtime/zero/stage3.py, estimate_zero3_model_states_mem_needs: bytes per parameter in
# host memory with optimizer or also parameters offloaded, and the factor for its buffers.
_ZERO3_HOST_BYTES = 18
_ZERO3_HOST_FACTOR = 1.5

# A state below this share of the card cannot be why a job does not fit, with gathers and copies on top.
NEGLIGIBLE_STATE = 0.25
# Weights below this share of the card are not why loading them failed: one more copy would fit.
SMALL_WEIGHTS = 0.45
# A complete state below this share leaves room for the activations of one short text.
_ROOMY_STATE = 0.35


class NeedsDict(TypedDict, total=False):
    """The needs as plain values."""

    num_parameters: int
    bytes_per_parameter: int
    whole_weights_bytes: int
    whole_state_bytes: int
    rank_state_bytes: int | None
    sharded_weights_bytes: int | None
    sharded_state_bytes: int | None
    host_bytes: int | None


@dataclass(frozen=True)
class Needs:
    """Bytes per rank; `whole_*` if nothing is sharded, `rank_*` under the configured sharding.

    `state` is parameters, gradients and optimizer as configured, else mixed precision with Adam at
    16 B per parameter; the weights alone where only adapters are trained. What depends on an
    unknown number of ranks is None.
    """

    num_parameters: int
    bytes_per_parameter: int
    whole_weights_bytes: int
    whole_state_bytes: int
    rank_state_bytes: int | None
    sharded_weights_bytes: int | None  # if sharded over all ranks
    sharded_state_bytes: int | None
    host_bytes: int | None

    def to_dict(self) -> NeedsDict:
        """Return the needs as plain values."""
        return {
            "num_parameters": self.num_parameters,
            "bytes_per_parameter": self.bytes_per_parameter,
            "whole_weights_bytes": self.whole_weights_bytes,
            "whole_state_bytes": self.whole_state_bytes,
            "rank_state_bytes": self.rank_state_bytes,
            "sharded_weights_bytes": self.sharded_weights_bytes,
            "sharded_state_bytes": self.sharded_state_bytes,
            "host_bytes": self.host_bytes,
        }


class PlannedPeaksDict(TypedDict, total=False):
    """The planned peaks as plain values; the fused one only where the optimizer is an assumption."""

    planned_peak_bytes: int
    planned_peak_phase: PlanPhase
    planned_optimizer_impl: OptimizerImpl
    budget_bytes: int
    planned_verdict: Verdict
    planned_fused_peak_bytes: int | None


@dataclass(frozen=True)
class PlannedPeaks:
    """The peak per rank that the plan of the case predicts.

    `assumes_optimizer_impl` is set where the case does not name the implementation;
    `fused_peak_bytes` is then the peak with the fused one, None where it cannot be planned.
    """

    peak_bytes: int
    peak_phase: PlanPhase
    optimizer_impl: OptimizerImpl
    budget_bytes: int
    verdict: Verdict
    assumes_optimizer_impl: bool
    fused_peak_bytes: int | None = None

    def to_dict(self) -> PlannedPeaksDict:
        """Return the peaks as plain values."""
        values: PlannedPeaksDict = {
            "planned_peak_bytes": self.peak_bytes,
            "planned_peak_phase": self.peak_phase,
            "planned_optimizer_impl": self.optimizer_impl,
            "budget_bytes": self.budget_bytes,
            "planned_verdict": self.verdict,
        }
        if self.assumes_optimizer_impl:
            values["planned_fused_peak_bytes"] = self.fused_peak_bytes
        return values


def compute_needs(evidence: Evidence) -> Needs | None:
    """Return what the job needs, or None where the number of parameters is not known."""
    count = evidence.num_parameters
    if not count:
        return None
    ranks = evidence.ranks
    weight_bits = 8 * _weight_bytes(evidence)
    if evidence.precision.bits:
        weight_bits = evidence.precision.bits
    weights = count * weight_bits // 8
    per_parameter = _bytes_per_parameter(evidence)
    state = count * per_parameter
    if evidence.trains_adapters:
        per_parameter, state = max(1, weight_bits // 8), weights
    return Needs(
        num_parameters=count,
        bytes_per_parameter=per_parameter,
        whole_weights_bytes=weights,
        whole_state_bytes=state,
        rank_state_bytes=_rank_state(evidence, state),
        sharded_weights_bytes=weights // ranks if ranks else None,
        sharded_state_bytes=state // ranks if ranks else None,
        host_bytes=_host_bytes(evidence, count),
    )


def _weight_bytes(evidence: Evidence) -> int:
    stored = evidence.case.parameters or evidence.precision.parameters
    return 4 if stored is Precision.FLOAT32 and not evidence.precision.mixed else 2


# Beside parameter and gradient: two moments, and the rest of a split master.
_8_BIT_STATE_BYTES = {
    Optimizer.ADAMW_8BIT: 2,
    Optimizer.ADAMW_SPLIT: 4,
    Optimizer.ADAMW_SPLIT24: 3,
}


def _bytes_per_parameter(evidence: Evidence) -> int:
    stored = evidence.case.parameters or evidence.precision.parameters
    half = stored in (Precision.BFLOAT16, Precision.FLOAT16)
    pair = 4 if half else 8  # parameter and gradient
    if evidence.optimizer is Optimizer.ADAMW_BF16:
        return 8
    if evidence.optimizer in _8_BIT_STATE_BYTES:
        return _8_BIT_STATE_BYTES[evidence.optimizer] + (
            pair if evidence.optimizer is Optimizer.ADAMW_8BIT else 4
        )
    if evidence.optimizer in (Optimizer.ADAFACTOR, Optimizer.SGD):
        return pair
    return 2 * pair


def _rank_state(evidence: Evidence, state: int) -> int | None:
    framework, ranks, count = evidence.framework, evidence.ranks, evidence.num_parameters or 0
    divided = evidence.shards_parameters or framework in (Framework.ZERO1, Framework.ZERO2)
    if not divided:
        return state
    if not ranks:
        return None
    if evidence.shards_parameters:
        return state // ranks
    if evidence.trains_adapters:
        return state
    # Whole weights, and gradients that are whole until they are reduced, at 2 bytes each.
    return 4 * count + (state - 4 * count) // ranks


def _host_bytes(evidence: Evidence, count: int) -> int | None:
    """Return the host memory that all ranks of the node take together, or None if not known."""
    if evidence.offloads and evidence.framework is Framework.ZERO3:
        return int(count * _ZERO3_HOST_BYTES * _ZERO3_HOST_FACTOR)
    if evidence.offloads:
        return count * _bytes_per_parameter(evidence)
    return None


def state_is_small(evidence: Evidence, needs: Needs | None, card: int | None) -> bool:
    """Return whether what a rank holds before any activation is no reason not to fit."""
    if needs is None or not card:
        return False
    if evidence.phase in (FailurePhase.LOAD, FailurePhase.WRAP):
        least = needs.sharded_weights_bytes or needs.whole_weights_bytes
        return least < SMALL_WEIGHTS * card
    held, complete = needs.rank_state_bytes, evidence.trains_adapters
    return held is not None and held < (_ROOMY_STATE if complete else NEGLIGIBLE_STATE) * card
