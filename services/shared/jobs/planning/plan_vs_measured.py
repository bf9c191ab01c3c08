"""Planned memory of each phase compared with what the ranks measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from services.shared.jobs.documents import JobPlanDict, MeasuredPeaks, ObservedSharding

# Where the probe has an allocator's counters, it counts what the plan counts. Elsewhere (a CPU) it
# walks the trained model's parameters, gradients and optimizer state: that is all there is in this
# phase of a teacher job under FSDP2. FSDP1 makes flat copies while it wraps, which are freed before
# the probe walks; loading also has the optimizer's state where an attempt resumes.
ALLOCATOR = "allocator"
_WALKED = "wrap"


class PhaseMemory(BaseModel):
    """The peak of one phase; None where it was not planned or not measured."""

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
    """One rank's phases; `basis` names what its probe could count."""

    model_config = ConfigDict(frozen=True)

    basis: str | None
    phases: dict[str, PhaseMemory]


@dataclass(frozen=True)
class PlannedPhases:
    """The part of a plan that measurements are compared with."""

    peaks: Mapping[str, int]  # by phase, in bytes
    engine: str | None = None
    teacher_placement: str | None = None

    @classmethod
    def of(cls, plan: JobPlanDict | None) -> PlannedPhases:
        """Return the phases of a stored plan; none of a job without a plan."""
        if plan is None:
            return cls({})
        recipe = plan.get("recipe")
        return cls(
            peaks=plan.get("phases") or {},
            engine=recipe.get("engine") if recipe else None,
            teacher_placement=plan.get("teacher_placement"),
        )

    def compare(self, peaks: Mapping[str, int], *, basis: str | None) -> dict[str, PhaseMemory]:
        """Return each phase that is planned or in `peaks`, which one rank measured."""
        walks = basis is not None and self.engine == "fsdp2" and not self.teacher_placement
        return {
            phase: PhaseMemory(
                planned_bytes=self.peaks.get(phase),
                measured_bytes=peaks.get(phase),
                comparable=basis == ALLOCATOR or (walks and phase == _WALKED),
            )
            for phase in {**self.peaks, **peaks}
        }


def compare_phases(
    planned: PlannedPhases, measured: MeasuredPeaks | None, observed: ObservedSharding | None
) -> dict[str, RankMemory]:
    """Return planned and measured peaks by rank, from the documents stored with a job."""
    found = {}
    for rank, peaks in (measured or {}).items():
        seen = (observed or {}).get(rank)
        basis = seen.get("basis") if seen else None
        found[rank] = RankMemory(basis=basis, phases=planned.compare(peaks, basis=basis))
    return found
