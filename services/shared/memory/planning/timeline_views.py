"""Timelines of training that no engine of ours runs, derived from one that it does.

`FrozenBase` is training of adapters (LoRA, QLoRA): the base has no gradient and no optimizer state, and may
be stored in 4 or 8 bits. `ZeroPartitions` is DeepSpeed's ZeRO: flat partitions of float32 state that are
allocated before the first step, and buckets. Each replaces the bytes of weights, gradients and state in
every point of a plan; what layers allocate is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from services.shared.memory.planning.allocation_tape import Moment, rounded
from services.shared.memory.planning.ledger import Components, PlanPhase, Point
from services.shared.memory.planning.rank_job import RankJob
from services.shared.memory.recipe import Engine

# bitsandbytes, functional.py (quantize_4bit): one float32 scale for each block of 64 values; the 8-bit
# weights of LLM.int8 have one a row, which is negligible.
_SCALES_4BIT = 4 / 64
# float32 weight, gradient and both moments of AdamW for each parameter of an adapter.
_ADAPTER_BYTES = 16
# DeepSpeed: float32 master weights and both moments (runtime/zero/stage_1_and_2.py, stage3.py).
_ZERO_STATE_BYTES = 12
_SUB_GROUP = 1_000_000_000  # elements that stage 3 updates at a time (runtime/zero/config.py)
# Points of a unit's gradient, which a frozen unit does not have.
_OF_GRADIENTS = (
    "flat gradient",
    "gradient of",
    "reduced gradient",
    "reduce-scatter input",
    "whole gradients",
    "optimizer update in backward",
    "gradients of the step before",
)


class TimelineView(Protocol):
    """A way of training whose timeline follows from that of a plan."""

    def points(self, job: RankJob, points: Iterable[Point]) -> Iterator[Point]:
        """Yield the points of this way of training; what it does not allocate is left out."""


@dataclass(frozen=True)
class FrozenBase:
    """Adapters over frozen weights: `bits` is 4 or 8 where these are quantised, None where not.

    `adapter_parameters` are those that train; each rank holds all of their state, as peft leaves it
    unsharded under DDP and DeepSpeed below stage 3, and a share of it under sharding.
    """

    bits: int | None = None
    adapter_parameters: int = 0

    def weight_share(self, job: RankJob) -> float:
        """Return the bytes of the stored weights, as a share of those in the parameters' dtype."""
        if self.bits is None:
            return 1.0
        matrices = sum(
            tensor.elements
            for unit in job.shape.layers
            for tensor in unit.tensors
            if len(tensor.shape) > 1
        )
        width = job.recipe.parameters.size_bytes
        stored = self.bits / 8 + (_SCALES_4BIT if self.bits == 4 else 0)
        rest = job.shape.num_parameters - matrices
        return (matrices * stored + rest * width) / (job.shape.num_parameters * width)

    def points(self, job: RankJob, points: Iterable[Point]) -> Iterator[Point]:
        """Yield the points without gradients and state; a quantised weight is unpacked where it is used."""
        share, buckets = self.weight_share(job), _ddp_buckets(job)
        largest = max(t.elements for unit in job.shape.layers for t in unit.tensors)
        unpacked = rounded(largest * job.recipe.compute.size_bytes) if self.bits else 0
        state = rounded(_ADAPTER_BYTES * self.adapter_parameters // job.units.shard_ranks)
        for point in points:
            if point.what.startswith(_OF_GRADIENTS) or point.phase is PlanPhase.OPTIMIZER_STEP:
                continue
            parts = point.components
            computing = point.phase in (PlanPhase.FORWARD, PlanPhase.BACKWARD)
            frozen = parts._replace(
                parameters=rounded(int(parts.parameters * share)),
                gradients=0,
                optimizer=state,
                unsharded=rounded(int(parts.unsharded * share)),
                communication=max(0, parts.communication - buckets - _reduction(job, point)),
                unsharded_gradients=0,
                temporaries=parts.temporaries + (unpacked if computing else 0),
            )
            yield _rebuilt(point, frozen, weight_gradients=False)


@dataclass(frozen=True)
class ZeroPartitions:
    """ZeRO stage 1, 2 or 3 over `ranks`: weights and gradients of 2 bytes, state of 12 in partitions.

    The plan that it changes is that of a replica for stages 1 and 2, of full sharding for stage 3.
    `bucket_elements` is `reduce_bucket_size`; `overlaps` doubles the buffer (`overlap_comm`).
    """

    stage: int
    ranks: int
    bucket_elements: int = 500_000_000
    overlaps: bool = False

    def points(self, job: RankJob, points: Iterable[Point]) -> Iterator[Point]:
        """Yield the points with flat partitions of the state from the beginning, and the bucket."""
        count = job.shape.num_parameters
        partition = -(-count // self.ranks)
        state = rounded(_ZERO_STATE_BYTES * partition)
        weights = rounded(2 * (partition if self.stage == 3 else count))
        bucket = rounded(2 * min(self.bucket_elements, count)) * (2 if self.overlaps else 1)
        buckets, updated = _ddp_buckets(job), 0
        for point in points:
            if point.phase is PlanPhase.OPTIMIZER_STEP:
                if point.step > updated:
                    updated = point.step
                    yield self._update(job, point.step, weights, state)
                continue
            if point.what.startswith(_OF_GRADIENTS) and self.stage == 3:
                continue
            parts, backward = point.components, point.phase is PlanPhase.BACKWARD
            gradients = self._gradients(job, point, partition)
            zero = parts._replace(
                parameters=weights,
                optimizer=state if point.step else 0,
                gradients=gradients,
                communication=max(0, parts.communication - buckets - _reduction(job, point))
                + (bucket if backward else 0),
                unsharded_gradients=0,
            )
            yield _rebuilt(point, zero, weight_gradients=True)

    def _gradients(self, job: RankJob, point: Point, partition: int) -> int:
        """Return the gradients that are kept: whole ones below stage 2, a partition from it on."""
        if point.phase is not PlanPhase.BACKWARD:
            return 0
        if self.stage > 1:
            return rounded(2 * partition)
        done = job.num_layers - (point.layer if point.layer is not None else job.num_layers)
        return job.gradients_below[-1] * done // job.num_layers

    def _update(self, job: RankJob, step: int, weights: int, state: int) -> Point:
        """Return the update: the gradient's partition, or a sub-group of it, is copied to float32."""
        count = job.shape.num_parameters
        partition = -(-count // self.ranks)
        gradients = rounded(2 * (count if self.stage == 1 else partition))
        copied = rounded(4 * (min(partition, _SUB_GROUP) if self.stage == 3 else partition))
        what = "gradient partition in float32"
        parts = Components(
            parameters=weights, optimizer=state, gradients=gradients, temporaries=copied
        )
        live = sum(parts)
        moments = (Moment(live, copied, what),)
        phase = PlanPhase.OPTIMIZER_STEP
        return Point(phase, step, 0, "all", None, what, copied, live, parts, 0, moments)


def _ddp_buckets(job: RankJob) -> int:
    return job.gradient_bytes if job.recipe.engine is Engine.DDP and job.ranks > 1 else 0


def _reduction(job: RankJob, point: Point) -> int:
    """Return the bytes of the previous layer's reduction that FSDP2 holds at a point of backward."""
    if point.phase is not PlanPhase.BACKWARD or job.fsdp1 or point.layer is None:
        return 0
    after_it = job.units.layers[point.layer + 1 : point.layer + 2]
    return after_it[0].reduce_input_bytes if after_it else 0


def _rebuilt(point: Point, parts: Components, *, weight_gradients: bool) -> Point:
    """Return `point` over other weights and state; its moments keep what the layer itself allocates."""
    worst = point.maxima[-1]
    if point.base_bytes == 0 and len(point.maxima) == 1:
        live = sum(parts)
        only = (worst._replace(live_bytes=live),)
        return point._replace(live_bytes=live, components=parts, maxima=only)
    kept = 0 if weight_gradients else 1
    added = parts.temporaries - point.components.temporaries
    base = sum(parts) - parts.temporaries
    moments = tuple(
        m._replace(live_bytes=m.live_bytes - kept * m.weight_gradient_bytes + added)
        for m in point.maxima
    )
    highest = max(moments, key=lambda m: m.live_bytes)
    increasing = tuple(
        m for i, m in enumerate(moments) if all(m.live_bytes > o.live_bytes for o in moments[:i])
    )
    parts = parts._replace(temporaries=highest.live_bytes)
    return point._replace(
        what=highest.what,
        request_bytes=highest.request_bytes,
        live_bytes=base + highest.live_bytes,
        components=parts,
        base_bytes=base,
        maxima=increasing,
    )
