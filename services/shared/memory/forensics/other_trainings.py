"""Scenarios of training that no recipe of ours describes: adapters over frozen weights, and ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from services.shared.memory.forensics.diagnosis import Cause
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import Framework
from services.shared.memory.recipe import Engine, OptimizerImpl, Sharding

ZERO_STAGES = (Framework.ZERO1, Framework.ZERO2, Framework.ZERO3)


@dataclass(frozen=True)
class Scenario:
    """One way of running the job; `caveat` is a further condition for it to happen."""

    what: str
    cause: Cause
    changes: dict[str, Any]
    ranks: int | None = None
    caveat: str = ""


def adapter_scenarios(evidence: Evidence) -> Iterator[Scenario]:
    """Yield frozen weights as configured, whole on every rank, and with all activations kept."""
    bits = evidence.precision.bits
    stored = f"{bits}-bit" if bits else "16-bit"
    how = "sharded" if evidence.shards_parameters else "whole"
    yield Scenario(
        f"adapters over {how} {stored} weights",
        Cause.LOGITS_OR_ACTIVATIONS,
        {"optimizer_impl": OptimizerImpl.FUSED},
    )
    if evidence.case.activation_checkpointing is None:
        yield Scenario(
            f"adapters over {how} {stored} weights, without activation checkpointing",
            Cause.LOGITS_OR_ACTIVATIONS,
            {"activation_checkpointing": False},
        )
    if evidence.shards_parameters:
        yield Scenario(
            f"adapters, not sharded: whole {stored} weights on every rank",
            Cause.NOT_SHARDED,
            {"engine": Engine.DDP, "sharding": Sharding.NONE},
        )


def zero_scenarios(evidence: Evidence) -> Iterator[Scenario]:
    """Yield the configured stage with and without checkpointing, and stage 3 without its division."""
    assert evidence.framework is not None
    stage = 1 + ZERO_STAGES.index(evidence.framework)
    yield Scenario(f"ZeRO-{stage} as configured", Cause.CAPACITY, {})
    if evidence.case.activation_checkpointing is None:
        yield Scenario(
            f"ZeRO-{stage} without activation checkpointing",
            Cause.LOGITS_OR_ACTIVATIONS,
            {"activation_checkpointing": False},
        )
