"""The JSON of a plan, which other programs read: field names are fixed, sizes are in bytes."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypedDict

from services.shared.memory.planning.ledger import PlanPhase
from services.shared.memory.recipe import PlannedRecipeDict


class Verdict(str, Enum):
    """Whether a job fits: `tight` when the headroom is less than the reserve's uncertainty."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does_not_fit"
    UNKNOWN = "unknown"

    __str__ = str.__str__


# Fields of `Recipe` to replace (enum members or their values), and TEACHER_PLACEMENT.
Changes = dict[str, Any]


class HostPlanDict(TypedDict):
    """The parts of a job's host memory."""

    processes: int
    data: int
    offloaded: int
    loading: int
    export: int


class AlternativeDict(TypedDict):
    """A change that fits, or one that the host has too little memory for."""

    change: str
    changes: Changes
    peak_bytes: int
    peak_phase: PlanPhase
    verdict: Verdict
    host_peak_bytes: int
    host_verdict: Verdict
    lossless: bool
    costs: str


class PlanDict(TypedDict):
    """The memory plan of one job, for its worst rank.

    `components` are keyed by the fields of `Components`, `phases` by `PlanPhase`; zeros are left out.
    """

    verdict: Verdict
    peak_bytes: int
    peak_phase: PlanPhase
    peak_step: int
    peak_at: str
    budget_bytes: int
    headroom_bytes: int
    components: dict[str, int]
    phases: dict[str, int]
    phase_components: dict[str, dict[str, int]]
    host_peak_bytes: int
    host_verdict: Verdict
    host_components: HostPlanDict
    layer_unit_bytes: int
    root_unit_bytes: int
    model: str
    num_parameters: int
    ranks: int
    device: str
    device_memory_bytes: int
    reserve_bytes: int
    uncertainty_bytes: int
    host_memory_bytes: int | None
    recipe: PlannedRecipeDict
    alternatives: list[AlternativeDict]
    refused: list[AlternativeDict]
