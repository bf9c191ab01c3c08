"""The timeline of a training step on one rank: what is alive at each point, under each engine.

Order of events and lifetimes follow torch 2.5's FullyShardedDataParallel and torch 2.13's
fully_shard; both were read and traced. All points of a step are given in the order in which they
happen, so a run with a given budget fails at the first point that exceeds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from services.shared.memory.planning.allocation_tape import Moment


class PlanPhase(str, Enum):
    """A phase of a training job, by the names of the plan's JSON."""

    LOAD = "load"
    WRAP = "wrap"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
    EVALUATION = "evaluation"
    EXPORT = "export"

    __str__ = str.__str__


class Components(NamedTuple):
    """Live bytes by kind; the sum is everything alive.

    `parameters`, `gradients` and `optimizer` are this rank's shards; `unsharded` are gathered
    parameters in compute dtype, `communication` buffers of gathers and reductions,
    `unsharded_gradients` whole gradients not yet reduced; `activations` live from forward to
    backward, `temporaries` for a moment. `other_model` is the teacher of a distillation.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    unsharded: int = 0
    communication: int = 0
    unsharded_gradients: int = 0
    activations: int = 0
    temporaries: int = 0
    other_model: int = 0


class Point(NamedTuple):
    """One moment of a step: its place, what is alive, and the request that led to it.

    `step` counts from 1, `micro_batch` and `layer` from 0. `maxima` are the successive maxima within
    the point, over `base_bytes`; the last is `live_bytes`, whose parts are `components`.
    """

    phase: PlanPhase
    step: int
    micro_batch: int
    unit: str
    layer: int | None
    what: str
    request_bytes: int
    live_bytes: int
    components: Components
    base_bytes: int
    maxima: tuple[Moment, ...]

    @property
    def allocated_bytes(self) -> int:
        """Bytes allocated just before the request."""
        return self.live_bytes - self.request_bytes


class Crossing(NamedTuple):
    """The first request that exceeds a budget: what is allocated, what is requested, and where."""

    allocated_bytes: int
    request_bytes: int
    what: str
    point: Point


class MemoryLedger:
    """Account for what is alive, and record a point for each moment that may be a peak."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self.phase, self.step, self.micro_batch = PlanPhase.LOAD, 0, 0
        self.parameters = self.gradients = self.optimizer = 0
        self.unsharded = self.communication = self.unsharded_gradients = 0
        self.activations = self.other_model = 0
        self.buckets = 0  # DDP's, from its construction to the end

    def enter(self, phase: PlanPhase, *, step: int = 0, micro_batch: int = 0) -> None:
        """Set the phase, step and micro-batch of the following points."""
        self.phase, self.step, self.micro_batch = phase, step, micro_batch

    def record(
        self,
        unit: str,
        layer: int | None,
        what: str,
        *,
        request_bytes: int = 0,
        unsharded: int = 0,
        communication: int = 0,
        unsharded_gradients: int = 0,
        temporaries: int = 0,
    ) -> None:
        """Record a point: what is alive now and, for this moment only, the amounts passed."""
        components = Components(
            self.parameters,
            self.gradients,
            self.optimizer,
            self.unsharded + unsharded,
            self.communication + communication + self.buckets,
            self.unsharded_gradients + unsharded_gradients,
            self.activations,
            temporaries,
            self.other_model,
        )
        live = sum(components)
        moments = (Moment(live, request_bytes, what),)
        self._append(unit, layer, what, request_bytes, components, 0, moments)

    def record_tape(
        self,
        unit: str,
        layer: int | None,
        moments: Sequence[Moment],
        *,
        unsharded: int = 0,
        communication: int = 0,
    ) -> None:
        """Record a point for a tape played over what is alive now and the amounts passed."""
        if not moments:
            return
        worst = moments[-1]
        components = Components(
            self.parameters,
            self.gradients,
            self.optimizer,
            self.unsharded + unsharded,
            self.communication + communication + self.buckets,
            self.unsharded_gradients + worst.weight_gradient_bytes,
            self.activations,
            worst.live_bytes - worst.weight_gradient_bytes,
            self.other_model,
        )
        base = sum(components) - worst.live_bytes
        maxima = tuple(moments)
        self._append(unit, layer, worst.what, worst.request_bytes, components, base, maxima)

    def _append(
        self,
        unit: str,
        layer: int | None,
        what: str,
        request_bytes: int,
        components: Components,
        base_bytes: int,
        maxima: tuple[Moment, ...],
    ) -> None:
        live = base_bytes + maxima[-1].live_bytes
        self.points.append(
            Point(
                self.phase,
                self.step,
                self.micro_batch,
                unit,
                layer,
                what,
                request_bytes,
                live,
                components,
                base_bytes,
                maxima,
            )
        )


def first_exceeding(points: Sequence[Point], budget_bytes: int) -> Crossing | None:
    """Return the first request that would take the allocated bytes above `budget_bytes`."""
    for point in points:
        if point.live_bytes <= budget_bytes:
            continue
        for moment in point.maxima:
            live = point.base_bytes + moment.live_bytes
            if live > budget_bytes:
                allocated = live - moment.request_bytes
                return Crossing(allocated, moment.request_bytes, moment.what, point)
    return None
