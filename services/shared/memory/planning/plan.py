"""The memory plan: what a job takes on each rank, when, and whether the hardware holds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.errors import InvalidInput
from services.shared.memory.hardware import Hardware
from services.shared.memory.planning.frozen_teacher import FrozenTeacher, inference_recipe
from services.shared.memory.planning.host_memory import HOST_UNCERTAINTY_BYTES, HostPlan, host_plan
from services.shared.memory.planning.layers import check_planned
from services.shared.memory.planning.ledger import (
    Components,
    Crossing,
    PlanPhase,
    Point,
    first_past,
)
from services.shared.memory.planning.plan_contract import AlternativeDict, PlanDict
from services.shared.memory.planning.rank_job import RankJob, job_of
from services.shared.memory.planning.sharding_units import shard_ranks
from services.shared.memory.planning.training_step import timeline
from services.shared.memory.recipe import Engine, Recipe, Sharding

# Peaks of these are reported, but none can be the job's: nothing is saved, no gradient is alive.
_NEVER_THE_PEAK = frozenset({PlanPhase.EVALUATION})


class Verdict(str, Enum):
    """Whether a plan fits: `tight` when what is left is less than what we do not know."""

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does_not_fit"
    UNKNOWN = "unknown"

    __str__ = str.__str__


@dataclass(frozen=True)
class Plan:
    """The plan of one job: per rank, for the worst rank; every size in bytes.

    `points` are the moments that may be peaks, in order, the layers between the ends left out;
    `timeline` has every layer. `peak` is the highest of them.
    """

    shape: Shape
    recipe: Recipe
    hardware: Hardware
    job: RankJob
    other: RankJob | None
    points: tuple[Point, ...]
    host: HostPlan

    @cached_property
    def peak(self) -> Point:
        """The first moment of the highest point."""
        peak = max(
            (point for point in self.points if point.phase not in _NEVER_THE_PEAK),
            key=lambda point: point.live_bytes,
        )
        assert sum(peak.components) == peak.live_bytes, peak
        return peak

    @property
    def peak_bytes(self) -> int:
        """The most that is ever allocated on a rank."""
        return self.peak.live_bytes

    @property
    def peak_phase(self) -> PlanPhase:
        """The phase of the peak."""
        return self.peak.phase

    @property
    def components(self) -> Components:
        """What is alive at the peak; the sum is the peak."""
        return self.peak.components

    @cached_property
    def phase_peaks(self) -> dict[PlanPhase, Point]:
        """The highest point of each phase, in the order of the phases."""
        peaks: dict[PlanPhase, Point] = {}
        for point in self.points:
            best = peaks.get(point.phase)
            if best is None or point.live_bytes > best.live_bytes:
                peaks[point.phase] = point
        return {phase: peaks[phase] for phase in PlanPhase if phase in peaks}

    @property
    def budget_bytes(self) -> int:
        """What a device gives to tensors."""
        return self.hardware.budget_bytes

    @property
    def headroom_bytes(self) -> int:
        """What is left of the budget at the peak; negative where it does not fit."""
        return self.budget_bytes - self.peak_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether the device holds the peak."""
        return _verdict(self.headroom_bytes, self.hardware.device.uncertainty_bytes)

    @property
    def host_verdict(self) -> Verdict:
        """Whether the host holds its part; `unknown` when its memory was not said."""
        memory = self.hardware.host_memory_bytes
        if memory is None:
            return Verdict.UNKNOWN
        uncertainty = min(HOST_UNCERTAINTY_BYTES, memory // 16)
        return _verdict(memory - self.host.peak_bytes, uncertainty)

    @property
    def runs(self) -> bool:
        """Whether neither device nor host refuses the job."""
        return Verdict.DOES_NOT_FIT not in (self.verdict, self.host_verdict)

    @property
    def layer_unit_bytes(self) -> int:
        """One layer as one flat buffer in compute dtype: what a gather of it asks for."""
        return self.shape.layers[-1].elements * self.recipe.compute.size_bytes

    @property
    def root_unit_bytes(self) -> int:
        """Everything outside the layers as one flat buffer in compute dtype."""
        return self.job.units.root.elements * self.recipe.compute.size_bytes

    @cached_property
    def timeline(self) -> tuple[Point, ...]:
        """Every point of the job, all layers included, in the order of time."""
        return tuple(_points(self.job, self.other, ends_only=False))

    def first_past(self, budget_bytes: int) -> Crossing | None:
        """Return the request at which a device of `budget_bytes` runs out, or None if it holds."""
        return first_past(self.timeline, budget_bytes)

    def to_dict(
        self, alternatives: Sequence[AlternativeDict] = (), refused: Sequence[AlternativeDict] = ()
    ) -> PlanDict:
        """Return the plan as the JSON object that other programs read.

        `refused` are changes that the host cannot hold.
        """
        peak = self.peak
        return {
            "verdict": str(self.verdict),
            "peak_bytes": self.peak_bytes,
            "peak_phase": str(self.peak_phase),
            "peak_step": peak.step,
            "peak_at": _where(peak),
            "budget_bytes": self.budget_bytes,
            "headroom_bytes": self.headroom_bytes,
            "components": _sized(peak.components),
            "phases": {str(p): point.live_bytes for p, point in self.phase_peaks.items()},
            "phase_components": {
                str(p): _sized(point.components) for p, point in self.phase_peaks.items()
            },
            "host_peak_bytes": self.host.peak_bytes,
            "host_verdict": str(self.host_verdict),
            "host_components": self.host.to_dict(),
            "layer_unit_bytes": self.layer_unit_bytes,
            "root_unit_bytes": self.root_unit_bytes,
            "model": self.shape.name,
            "num_parameters": self.shape.num_parameters,
            "ranks": self.hardware.ranks,
            "device": self.hardware.device.name,
            "device_memory_bytes": self.hardware.device.memory_bytes,
            "reserve_bytes": self.hardware.device.reserve_bytes,
            "uncertainty_bytes": self.hardware.device.uncertainty_bytes,
            "host_memory_bytes": self.hardware.host_memory_bytes,
            "recipe": self.recipe.to_dict(),
            "alternatives": list(alternatives),
            "refused": list(refused),
        }


def plan(shape: Shape, recipe: Recipe, hardware: Hardware) -> Plan:
    """Return the memory plan of training `shape` with `recipe` on `hardware`.

    Raises InvalidInput for a family whose activations are unknown and for more ranks than a weight
    of a layer has rows.
    """
    check(shape, recipe, hardware)
    job = _job(shape, recipe, hardware)
    points = tuple(_points(job, None, ends_only=True))
    return Plan(shape, recipe, hardware, job, None, points, host_plan(job, hardware))


def plan_distillation(
    teacher: FrozenTeacher, student: Shape, hardware: Hardware, *, student_recipe: Recipe
) -> Plan:
    """Return the plan of training a student together with its teacher.

    The teacher is held in the student's compute dtype, layer by layer over all ranks or whole on each;
    it sees the student's micro-batches. Peaks are those of both together, on each rank.
    """
    recipe = inference_recipe(student_recipe, teacher)
    check(teacher.shape, recipe, hardware)
    check(student, student_recipe, hardware)
    job, other = _job(student, student_recipe, hardware), _job(teacher.shape, recipe, hardware)
    points = tuple(_points(job, other, ends_only=True))
    student_host, teacher_host = host_plan(job, hardware), host_plan(other, hardware)
    host = student_host._replace(loading=student_host.loading + teacher_host.loading)
    return Plan(student, student_recipe, hardware, job, other, points, host)


def check(shape: Shape, recipe: Recipe, hardware: Hardware) -> None:
    """Raise InvalidInput where these three cannot go together."""
    check_planned(shape.dims)
    divided, most = shard_ranks(recipe, hardware.ranks), most_ranks(shape)
    if divided > most:
        raise InvalidInput(
            "ranks",
            f"{divided} ranks share a weight of {most} rows: some would hold nothing of it",
            accepted=f"1 to {most}",
        )
    if recipe.sharding is Sharding.HYBRID and hardware.ranks % divided:
        raise InvalidInput(
            "shard_ranks", f"groups of {divided} do not divide {hardware.ranks} ranks"
        )
    if recipe.engine is Engine.FSDP2 and recipe.parameters.size_bytes < recipe.compute.size_bytes:
        raise InvalidInput("compute", f"{recipe.compute} over parameters in {recipe.parameters}")


def most_ranks(shape: Shape) -> int:
    """Return over how many ranks a model can be sharded: every rank holds a row of each weight."""
    return min(t.shape[0] for t in shape.layers[-1].tensors if len(t.shape) > 1)


def _job(shape: Shape, recipe: Recipe, hardware: Hardware) -> RankJob:
    # On a CPU torch takes other kernels, wherever an operation has one per device.
    cpu = hardware.device.name == "cpu"
    return job_of(shape, recipe, hardware.ranks, cpu_kernels=cpu)


def _points(job: RankJob, other: RankJob | None, *, ends_only: bool) -> list[Point]:
    return timeline(job, other, ends_only=ends_only)


def _verdict(headroom_bytes: int, uncertainty_bytes: int) -> Verdict:
    if headroom_bytes < 0:
        return Verdict.DOES_NOT_FIT
    return Verdict.TIGHT if headroom_bytes < uncertainty_bytes else Verdict.FITS


def _sized(components: Components) -> dict[str, int]:
    return {name: size for name, size in components._asdict().items() if size}


def _where(point: Point) -> str:
    place = point.unit if point.layer is None else f"{point.unit} {point.layer}"
    return f"{place}: {point.what}"
