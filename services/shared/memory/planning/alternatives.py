"""The changes that make a job fit, the least loss of fidelity first: the rungs that help, tried."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.hardware import Hardware
from services.shared.memory.planning.frozen_teacher import Beside, Placement
from services.shared.memory.planning.plan import Plan, Verdict, most_ranks, plan, plan_distillation
from services.shared.memory.recipe import (
    Attention,
    Embedding,
    Engine,
    Offload,
    Optimizer,
    OptimizerImpl,
    Precision,
    Prefetch,
    Recipe,
    Sharding,
    Wrap,
)

Changes = dict[str, Any]

# The one change that is not of the student's recipe: how the teacher beside it lies on the ranks.
TEACHER_PLACEMENT = "teacher_placement"


@dataclass(frozen=True)
class Rung:
    """One change of a recipe, in words, and what it costs."""

    changes: Changes
    change: str
    costs: str
    lossless: bool = True


def beside(teacher: Beside | None, hardware: Hardware) -> Iterator[Rung]:
    """Yield what touches the teacher alone."""
    if teacher is None or teacher.placement is Placement.SHARDED or hardware.ranks == 1:
        return
    if not teacher.whole_only and hardware.ranks <= most_ranks(teacher.shape):
        yield Rung(
            {TEACHER_PLACEMENT: Placement.SHARDED},
            "shard the teacher over all ranks",
            "its layers are gathered for every batch that it answers",
        )


def lossless(recipe: Recipe) -> Iterator[Rung]:
    """Yield what leaves every computed number as it is, the cheapest in time first."""
    yield from _sharding(recipe)
    if not recipe.activation_checkpointing:
        yield Rung(
            {"activation_checkpointing": True},
            "recompute activations (activation checkpointing)",
            "about a third more compute: every layer runs forward twice",
        )
    if recipe.attention is not Attention.SDPA:
        yield Rung(
            {"attention": Attention.SDPA},
            "fused attention (sdpa)",
            "faster; needs a flash or memory-efficient kernel on the device",
        )
    if recipe.optimizer is Optimizer.ADAMW and recipe.optimizer_impl is OptimizerImpl.FOREACH:
        yield Rung(
            {"optimizer_impl": OptimizerImpl.FUSED},
            "fused AdamW",
            "faster; no temporary of the parameters' size in the update",
        )
    if not recipe.optimizer_in_backward and recipe.accumulate == 1:
        yield Rung(
            {"optimizer_in_backward": True},
            "apply the optimizer in backward",
            "no gradient is kept; the norm is clipped unit by unit, and no step can be skipped",
        )
    if recipe.embedding is Embedding.ROOT and recipe.wrap is Wrap.LAYER:
        yield Rung(
            {"embedding": Embedding.OWN},
            "a sharding unit of its own for the embedding",
            "one more gather a pass",
        )
    yield from _smaller_batches(recipe)


def _sharding(recipe: Recipe) -> Iterator[Rung]:
    if recipe.engine is Engine.DDP:
        yield Rung(
            {"engine": Engine.FSDP2, "sharding": Sharding.FULL},
            "shard parameters, gradients and optimizer state (FSDP)",
            "parameters are gathered layer by layer in forward and in backward",
        )
    elif recipe.sharding is not Sharding.FULL:
        yield Rung(
            {"sharding": Sharding.FULL}
            | ({} if recipe.shard_ranks is None else {"shard_ranks": None}),
            "shard fully over all ranks",
            "one more gather of every layer a step",
        )
    if recipe.wrap is Wrap.ROOT:
        yield Rung(
            {"wrap": Wrap.LAYER},
            "one sharding unit a layer",
            "one gather a layer, none of the whole",
        )
    if not recipe.reduce_each and recipe.accumulate > 1:
        yield Rung(
            {"reduce_each": True},
            "reduce the gradients of every micro-batch",
            f"{recipe.accumulate} reductions a step instead of one",
        )
    if recipe.prefetch is not Prefetch.NONE:
        yield Rung({"prefetch": Prefetch.NONE}, "no backward prefetch", "gathers wait their turn")


def _smaller_batches(recipe: Recipe) -> Iterator[Rung]:
    """Yield halved micro-batches of the same global batch."""
    divisor = 2
    while divisor <= recipe.micro_batch:
        if recipe.micro_batch % divisor == 0:
            micro, accumulate = recipe.micro_batch // divisor, recipe.accumulate * divisor
            yield Rung(
                {"micro_batch": micro, "accumulate": accumulate},
                f"micro-batches of {micro}, {accumulate} of them a step (the same global batch)",
                f"{divisor} times as many gathers; smaller matrix products",
            )
        divisor *= 2


def smaller_state(recipe: Recipe) -> Iterator[Rung]:
    """Yield optimizers that keep less, the closest to AdamW in float32 first."""
    if recipe.optimizer is Optimizer.SGD:
        return
    if recipe.optimizer is Optimizer.ADAMW:
        narrow: Changes = {"optimizer": Optimizer.ADAMW_BF16, "parameters": Precision.BFLOAT16}
        if recipe.compute is Precision.FLOAT32:
            # FSDP gathers in the compute dtype; a wider one would restore what was not kept.
            narrow["compute"] = Precision.BFLOAT16
        yield Rung(
            narrow,
            "AdamW with parameters and moments in bfloat16, stochastic rounding",
            "right on average but noisier: 8 bits of mantissa in parameters and moments",
            lossless=False,
        )
    if recipe.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_BF16):
        yield Rung(
            {"optimizer": Optimizer.ADAFACTOR},
            "Adafactor",
            "another optimizer: factored second moments, no first moment; tune the rate anew",
            lossless=False,
        )
        yield Rung(
            {"optimizer": Optimizer.ADAMW_8BIT},
            "AdamW with 8-bit moments",
            "moments in blocks of 8-bit codes: close to full precision, not equal",
            lossless=False,
        )


def on_the_host(recipe: Recipe) -> Iterator[Rung]:
    """Yield what moves to the host's memory."""
    if recipe.offload is Offload.NONE:
        yield Rung(
            {"offload": Offload.OPTIMIZER},
            "optimizer state in host memory",
            "the update runs on the CPU: seconds a step for each billion parameters",
        )
    if recipe.offload is not Offload.ALL:
        yield Rung(
            {"offload": Offload.ALL},
            "parameters, gradients and optimizer state in host memory",
            "the update runs on the CPU and every gather comes over the bus: several times slower",
        )


# A rung that lowers the peak by less than half a percent is not worth its cost in a set.
_WORTHWHILE = 0.995


@dataclass(frozen=True)
class Alternative:
    """One recipe that fits: what to change, what it takes, what it costs.

    `changes` holds the fields of `Recipe` to replace, and TEACHER_PLACEMENT, as JSON values;
    `lossless` says that the training computes the same numbers but for the order of sums.
    """

    changes: Changes
    change: str
    costs: str
    lossless: bool
    plan: Plan

    def to_json(self) -> dict[str, Any]:
        """Return the alternative as plain JSON values."""
        return {
            "change": self.change,
            "changes": dict(self.changes),
            "peak_bytes": self.plan.peak_bytes,
            "peak_phase": str(self.plan.peak_phase),
            "verdict": str(self.plan.verdict),
            "host_peak_bytes": self.plan.host.peak_bytes,
            "host_verdict": str(self.plan.host_verdict),
            "lossless": self.lossless,
            "costs": self.costs,
        }


def alternatives(
    shape: Shape, recipe: Recipe, hardware: Hardware, *, teacher: Beside | None = None
) -> tuple[Alternative, ...]:
    """Return the changes of `recipe` that fit `hardware`, the least loss of fidelity first.

    Every rung is tried alone; the lossless ones also together as far as each helps, and the later
    ones on top of them where alone they do not suffice. With a `teacher` beside it, which a rung may
    shard, every plan is that of both.
    """
    ladder = _Ladder(shape, recipe, hardware, teacher)
    harmless = [*beside(teacher, hardware), *lossless(recipe)]
    for rung in harmless:
        ladder.offer(rung)
    together = ladder.climb(harmless)
    lossy = list(smaller_state(recipe))
    for rung in lossy:
        if not ladder.offer(rung):
            ladder.offer(*together, rung)
    smallest = lossy[:1]
    for rung in on_the_host(recipe):
        if not (ladder.offer(rung) or ladder.offer(*together, rung)):
            ladder.offer(*together, *smallest, rung)
    return tuple(ladder.found)


def refused_by_host(
    shape: Shape, recipe: Recipe, hardware: Hardware, *, teacher: Beside | None = None
) -> tuple[Alternative, ...]:
    """Return the offloads that the host does not hold, with what they would take of it."""
    ladder = _Ladder(shape, recipe, hardware, teacher)
    refused = []
    for rung in on_the_host(recipe):
        result = ladder.plan(rung.changes)
        if result.host_verdict is Verdict.DOES_NOT_FIT:
            changes = _plain(rung.changes)
            refused.append(Alternative(changes, rung.change, rung.costs, rung.lossless, result))
    return tuple(refused)


def choose(shape: Shape, recipe: Recipe, hardware: Hardware) -> Plan | None:
    """Return the plan of `recipe` where it fits, else of the first alternative; None without any.

    A plan that fits is preferred over one that is tight, within the same fidelity.
    """
    own = plan(shape, recipe, hardware)
    if own.runs and own.verdict is Verdict.FITS:
        return own
    offered = alternatives(shape, recipe, hardware)
    comfortable = [a.plan for a in offered if a.lossless and a.plan.verdict is Verdict.FITS]
    if comfortable:
        return comfortable[0]
    if own.runs:
        return own
    return offered[0].plan if offered else None


class _Ladder:
    """Tries sets of rungs on one job and keeps those that fit."""

    def __init__(
        self, shape: Shape, recipe: Recipe, hardware: Hardware, teacher: Beside | None
    ) -> None:
        self.shape, self.recipe, self.hardware, self.teacher = shape, recipe, hardware, teacher
        self.found: list[Alternative] = []
        self._tried: dict[tuple[Recipe, Placement | None], Plan] = {}
        self._base = self.plan({})

    def offer(self, *rungs: Rung) -> bool:
        """Keep the set where it fits and takes less than the recipe as it is; say whether it does."""
        changes = _merged(rungs)
        if self._setting(changes) in self._tried:
            return self.plan(changes).runs
        return self._keep(rungs)

    def climb(self, rungs: list[Rung]) -> tuple[Rung, ...]:
        """Take rungs in order, each that lowers the peak on top of the others; offer each height."""
        taken: tuple[Rung, ...] = ()
        lowest = self._base.peak_bytes
        for rung in rungs:
            peak = self.plan(_merged((*taken, rung))).peak_bytes
            if peak > lowest * _WORTHWHILE:
                continue
            taken, lowest = (*taken, rung), peak
            # A rung may undo the one before: half a micro-batch and a quarter are a quarter.
            if len(taken) > 1 and _merged(taken) != _merged((rung,)):
                self._keep(taken)
        return taken

    def _keep(self, rungs: tuple[Rung, ...]) -> bool:
        changes = _merged(rungs)
        result = self.plan(changes)
        if not result.runs or not self._saves_host_or_device(result):
            return False
        self.found.append(
            Alternative(
                changes=_plain(changes),
                change="; ".join(rung.change for rung in rungs),
                costs="; ".join(rung.costs for rung in rungs),
                lossless=all(rung.lossless for rung in rungs),
                plan=result,
            )
        )
        return True

    def plan(self, changes: Changes) -> Plan:
        """Return the plan of the job so changed."""
        setting = recipe, placement = self._setting(changes)
        if setting not in self._tried:
            if self.teacher is None:
                found = plan(self.shape, recipe, self.hardware)
            else:
                assert placement is not None
                found = plan_distillation(
                    replace(self.teacher, placement=placement),
                    self.shape,
                    self.hardware,
                    student_recipe=recipe,
                )
            self._tried[setting] = found
        return self._tried[setting]

    def _setting(self, changes: Changes) -> tuple[Recipe, Placement | None]:
        own = {name: value for name, value in changes.items() if name != TEACHER_PLACEMENT}
        placement = None if self.teacher is None else self.teacher.placement
        return self.recipe.with_changes(own), changes.get(TEACHER_PLACEMENT, placement)

    def _saves_host_or_device(self, result: Plan) -> bool:
        if result.recipe.offload is not Offload.NONE and result.host_verdict is Verdict.UNKNOWN:
            return False  # nobody said that the host holds it
        relieved = not self._base.runs and self._base.verdict is not Verdict.DOES_NOT_FIT
        return relieved or result.peak_bytes < self._base.peak_bytes


def _merged(rungs: tuple[Rung, ...]) -> Changes:
    changes: Changes = {}
    for rung in rungs:
        changes |= rung.changes
    return changes


def _plain(changes: Changes) -> Changes:
    return {name: str(v) if hasattr(v, "value") else v for name, v in changes.items()}
