"""The memory plan: a job's peaks on each rank, by phase, and whether the hardware holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    first_exceeding,
)
from services.shared.memory.planning.plan_contract import AlternativeDict, PlanDict, Verdict
from services.shared.memory.planning.rank_job import RankJob, job_of
from services.shared.memory.planning.sharding_units import shard_ranks
from services.shared.memory.planning.timeline_views import TimelineView
from services.shared.memory.planning.training_step import timeline
from services.shared.memory.recipe import Engine, Recipe, Sharding

# Peaks of these phases are reported, but never the job's: nothing is saved, no gradient is alive.
_EXCLUDED_FROM_PEAK = frozenset({PlanPhase.EVALUATION})


@dataclass(frozen=True)
class Plan:
    """The plan of one job, for its worst rank; every size in bytes.

    `points` are the moments that may be peaks, in order, without the middle layers; `timeline` has
    every layer.
    """

    shape: Shape
    recipe: Recipe
    hardware: Hardware
    job: RankJob
    teacher_job: RankJob | None
    points: tuple[Point, ...]
    host: HostPlan
    view: TimelineView | None = None

    @cached_property
    def peak(self) -> Point:
        """The highest point; the first of equal ones."""
        peak = max(
            (point for point in self.points if point.phase not in _EXCLUDED_FROM_PEAK),
            key=lambda point: point.live_bytes,
        )
        assert sum(peak.components) == peak.live_bytes, peak
        return peak

    @property
    def peak_bytes(self) -> int:
        """The peak of allocated bytes on a rank."""
        return self.peak.live_bytes

    @property
    def peak_phase(self) -> PlanPhase:
        """The phase of the peak."""
        return self.peak.phase

    @property
    def components(self) -> Components:
        """What is alive at the peak, by kind; the sum is the peak."""
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
        """The bytes of a device that tensors may take."""
        return self.hardware.budget_bytes

    @property
    def headroom_bytes(self) -> int:
        """The rest of the budget at the peak; negative where the job does not fit."""
        return self.budget_bytes - self.peak_bytes

    @property
    def verdict(self) -> Verdict:
        """Whether the device holds the peak."""
        return _verdict(self.headroom_bytes, self.hardware.device.uncertainty_bytes)

    @property
    def host_verdict(self) -> Verdict:
        """Whether the host holds its part; `unknown` where its memory is not known."""
        memory = self.hardware.host_memory_bytes
        if memory is None:
            return Verdict.UNKNOWN
        uncertainty = min(HOST_UNCERTAINTY_BYTES, memory // 16)
        return _verdict(memory - self.host.peak_bytes, uncertainty)

    @property
    def runs(self) -> bool:
        """Whether the job fits both device and host, as far as known."""
        return Verdict.DOES_NOT_FIT not in (self.verdict, self.host_verdict)

    @property
    def layer_unit_bytes(self) -> int:
        """One layer as one flat buffer in compute dtype: the size of a gather's request."""
        return self.shape.layers[-1].elements * self.recipe.compute.size_bytes

    @property
    def root_unit_bytes(self) -> int:
        """Everything outside the layers as one flat buffer in compute dtype."""
        return self.job.units.root.elements * self.recipe.compute.size_bytes

    @cached_property
    def timeline(self) -> tuple[Point, ...]:
        """Every point of the job, all layers included, in the order of time."""
        return _viewed(self.view, self.job, timeline(self.job, self.teacher_job, ends_only=False))

    def first_exceeding(self, budget_bytes: int) -> Crossing | None:
        """Return the first request that exceeds `budget_bytes`, or None."""
        return first_exceeding(self.timeline, budget_bytes)

    def to_dict(
        self, alternatives: Sequence[AlternativeDict] = (), refused: Sequence[AlternativeDict] = ()
    ) -> PlanDict:
        """Return the plan as the JSON object that other programs read.

        `refused` are changes whose host memory the host does not have.
        """
        peak = self.peak
        return {
            "verdict": self.verdict,
            "peak_bytes": self.peak_bytes,
            "peak_phase": self.peak_phase,
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
            "host_verdict": self.host_verdict,
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


def plan(
    shape: Shape,
    recipe: Recipe,
    hardware: Hardware,
    *,
    teacher: FrozenTeacher | None = None,
    view: TimelineView | None = None,
) -> Plan:
    """Return the memory plan of training `shape` with `recipe` on `hardware`.

    With a `teacher` it is that of a distillation: the teacher is held in the student's compute
    dtype, sharded over all ranks or whole on each, and sees the student's micro-batches; the peaks
    are those of both models together. With a `view` it is that of another way of training, such as that of
    adapters, which follows from the recipe's. Raises InvalidInput for a family whose activations are
    unknown and for more ranks than a weight of a layer has rows.
    """
    job, teacher_job = _rank_job(shape, recipe, hardware), None
    if teacher is not None:
        teacher_job = _rank_job(teacher.shape, inference_recipe(recipe, teacher), hardware)
    host = host_plan(job, hardware, teacher=teacher_job)
    points = _viewed(view, job, timeline(job, teacher_job, ends_only=True))
    return Plan(shape, recipe, hardware, job, teacher_job, points, host, view)


def _viewed(view: TimelineView | None, job: RankJob, points: Sequence[Point]) -> tuple[Point, ...]:
    return tuple(points if view is None else view.points(job, points))


def check(shape: Shape, recipe: Recipe, hardware: Hardware) -> None:
    """Raise InvalidInput where these three cannot be combined."""
    check_planned(shape.dims)
    divided, most = shard_ranks(recipe, hardware.ranks), max_shard_ranks(shape)
    if divided > most:
        raise InvalidInput(
            "ranks",
            f"{divided} ranks share a weight of {most} rows: some would hold none of it",
            accepted=f"1 to {most}",
        )
    if recipe.sharding is Sharding.HYBRID and hardware.ranks % divided:
        raise InvalidInput(
            "shard_ranks", f"groups of {divided} do not divide {hardware.ranks} ranks"
        )
    if recipe.engine is Engine.FSDP2 and recipe.parameters.size_bytes < recipe.compute.size_bytes:
        raise InvalidInput("compute", f"{recipe.compute} over parameters in {recipe.parameters}")


def max_shard_ranks(shape: Shape) -> int:
    """Return the most ranks that a model can be sharded over: each holds a row of every weight."""
    return min(t.shape[0] for t in shape.layers[-1].tensors if len(t.shape) > 1)


def _rank_job(shape: Shape, recipe: Recipe, hardware: Hardware) -> RankJob:
    check(shape, recipe, hardware)
    # On a CPU torch takes other kernels, wherever an operation has one per device.
    cpu = hardware.device.name == "cpu"
    return job_of(shape, recipe, hardware.ranks, cpu_kernels=cpu)


def _verdict(headroom_bytes: int, uncertainty_bytes: int) -> Verdict:
    if headroom_bytes < 0:
        return Verdict.DOES_NOT_FIT
    return Verdict.TIGHT if headroom_bytes < uncertainty_bytes else Verdict.FITS


def _sized(components: Components) -> dict[str, int]:
    return {name: size for name, size in components._asdict().items() if size}


def _where(point: Point) -> str:
    place = point.unit if point.layer is None else f"{point.unit} {point.layer}"
    return f"{place}: {point.what}"
