"""What a plan said of each phase, next to what the ranks measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

# Where the probe has an allocator's counters, it counts what the plan counts. Elsewhere (a CPU) it
# walks the trained model's parameters, gradients and optimizer state: that is all there is in this
# phase of a teacher job under FSDP2. FSDP1 makes flat copies while it wraps, which are gone when the
# probe walks; loading has the optimizer's state beside it where an attempt resumes.
ALLOCATOR = "allocator"
_WALKED = "wrap"


class PhaseMemory(BaseModel):
    """The highest moment of one phase; None where one side does not know it."""

    model_config = ConfigDict(frozen=True)

    planned_bytes: int | None
    measured_bytes: int | None
    comparable: bool = False  # whether the probe counts what the plan counts

    @property
    def error_ratio(self) -> float | None:
        """By how much the measurement exceeds the plan, as a share of the plan."""
        if not (self.comparable and self.planned_bytes and self.measured_bytes):
            return None
        return self.measured_bytes / self.planned_bytes - 1


class RankMemory(BaseModel):
    """One rank's phases; `basis` says what its probe could count."""

    model_config = ConfigDict(frozen=True)

    basis: str | None
    phases: dict[str, PhaseMemory]


def compare_phases(
    plan: Mapping[str, Any] | None,
    measured: Mapping[str, Mapping[str, int]] | None,
    observed: Mapping[str, Any] | None,
) -> dict[str, RankMemory]:
    """Return planned and measured peaks by rank, from what is stored with a job."""
    found = {}
    for rank, peaks in (measured or {}).items():
        basis = ((observed or {}).get(rank) or {}).get("basis")
        found[rank] = RankMemory(basis=basis, phases=phases_of(plan or {}, peaks, basis=basis))
    return found


def phases_of(
    plan: Mapping[str, Any], peaks: Mapping[str, int], *, basis: str | None
) -> dict[str, PhaseMemory]:
    """Return each phase that the plan or the probe knows; `plan` is the document of a plan."""
    planned: dict[str, int] = plan.get("phases") or {}
    is_fsdp2 = (plan.get("recipe") or {}).get("engine") == "fsdp2"
    walks = basis is not None and is_fsdp2 and not plan.get("teacher_placement")
    return {
        phase: PhaseMemory(
            planned_bytes=planned.get(phase),
            measured_bytes=peaks.get(phase),
            comparable=basis == ALLOCATOR or (walks and phase == _WALKED),
        )
        for phase in {**planned, **peaks}
    }
