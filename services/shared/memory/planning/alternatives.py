"""The changes that make a job fit, the least loss of fidelity first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.hardware import Hardware
from services.shared.memory.planning.frozen_teacher import FrozenTeacher, Placement
from services.shared.memory.planning.plan import Plan, Verdict, most_ranks, plan, plan_distillation
from services.shared.memory.planning.plan_contract import AlternativeDict, Changes
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

# The one change that is not of the student's recipe: how the teacher is placed on the ranks.
TEACHER_PLACEMENT = "teacher_placement"


@dataclass(frozen=True)
class RecipeChange:
    """One change of a recipe, in words, and what it costs."""

    changes: Changes
    change: str
    costs: str
    lossless: bool = True


def teacher_placement(teacher: FrozenTeacher | None, hardware: Hardware) -> Iterator[RecipeChange]:
    """Yield what touches the teacher alone."""
    if teacher is None or teacher.placement is Placement.SHARDED or hardware.ranks == 1:
        return
    if not teacher.whole_only and hardware.ranks <= most_ranks(teacher.shape):
        yield RecipeChange(
            {TEACHER_PLACEMENT: Placement.SHARDED},
            "shard the teacher over all ranks",
            "its layers are gathered for every batch that it answers",
        )


def lossless(recipe: Recipe) -> Iterator[RecipeChange]:
    """Yield what leaves every computed number as it is, the cheapest in time first."""
    yield from _sharding(recipe)
    if not recipe.activation_checkpointing:
        yield RecipeChange(
            {"activation_checkpointing": True},
            "recompute activations (activation checkpointing)",
            "about a third more compute: every layer runs forward twice",
        )
    if recipe.attention is not Attention.SDPA:
        yield RecipeChange(
            {"attention": Attention.SDPA},
            "fused attention (sdpa)",
            "faster; needs a flash or memory-efficient kernel on the device",
        )
    if recipe.optimizer is Optimizer.ADAMW and recipe.optimizer_impl is OptimizerImpl.FOREACH:
        yield RecipeChange(
            {"optimizer_impl": OptimizerImpl.FUSED},
            "fused AdamW",
            "faster; no temporary of the parameters' size in the update",
        )
    if not recipe.optimizer_in_backward and recipe.accumulate == 1:
        yield RecipeChange(
            {"optimizer_in_backward": True},
            "apply the optimizer in backward",
            "no gradient is kept; the norm is clipped unit by unit, and no step can be skipped",
        )
    if recipe.embedding is Embedding.ROOT and recipe.wrap is Wrap.LAYER:
        yield RecipeChange(
            {"embedding": Embedding.OWN},
            "a sharding unit of its own for the embedding",
            "one more gather a pass",
        )
    yield from _smaller_batches(recipe)


def _sharding(recipe: Recipe) -> Iterator[RecipeChange]:
    if recipe.engine is Engine.DDP:
        yield RecipeChange(
            {"engine": Engine.FSDP2, "sharding": Sharding.FULL},
            "shard parameters, gradients and optimizer state (FSDP)",
            "parameters are gathered layer by layer in forward and in backward",
        )
    elif recipe.sharding is not Sharding.FULL:
        yield RecipeChange(
            {"sharding": Sharding.FULL}
            | ({} if recipe.shard_ranks is None else {"shard_ranks": None}),
            "shard fully over all ranks",
            "one more gather of every layer a step",
        )
    if recipe.wrap is Wrap.ROOT:
        yield RecipeChange(
            {"wrap": Wrap.LAYER},
            "one sharding unit a layer",
            "one gather a layer, none of the whole",
        )
    if not recipe.reduce_each and recipe.accumulate > 1:
        yield RecipeChange(
            {"reduce_each": True},
            "reduce the gradients of every micro-batch",
            f"{recipe.accumulate} reductions a step instead of one",
        )
    if recipe.prefetch is not Prefetch.NONE:
        yield RecipeChange(
            {"prefetch": Prefetch.NONE}, "no backward prefetch", "gathers wait their turn"
        )


def _smaller_batches(recipe: Recipe) -> Iterator[RecipeChange]:
    """Yield halved micro-batches of the same global batch."""
    divisor = 2
    while divisor <= recipe.micro_batch:
        if recipe.micro_batch % divisor == 0:
            micro, accumulate = recipe.micro_batch // divisor, recipe.accumulate * divisor
            yield RecipeChange(
                {"micro_batch": micro, "accumulate": accumulate},
                f"micro-batches of {micro}, {accumulate} of them a step (the same global batch)",
                f"{divisor} times as many gathers; smaller matrix products",
            )
        divisor *= 2


def smaller_state(recipe: Recipe) -> Iterator[RecipeChange]:
    """Yield optimizers that keep less, the closest to AdamW in float32 first."""
    if recipe.optimizer is Optimizer.SGD:
        return
    if recipe.optimizer is Optimizer.ADAMW:
        narrow: Changes = {"optimizer": Optimizer.ADAMW_BF16, "parameters": Precision.BFLOAT16}
        if recipe.compute is Precision.FLOAT32:
            # FSDP gathers in the compute dtype; a wider one would restore what was not kept.
            narrow["compute"] = Precision.BFLOAT16
        yield RecipeChange(
            narrow,
            "AdamW with parameters and moments in bfloat16, stochastic rounding",
            "right on average but noisier: 8 bits of mantissa in parameters and moments",
            lossless=False,
        )
    if recipe.optimizer in (Optimizer.ADAMW, Optimizer.ADAMW_BF16):
        yield RecipeChange(
            {"optimizer": Optimizer.ADAFACTOR},
            "Adafactor",
            "another optimizer: factored second moments, no first moment; tune the rate anew",
            lossless=False,
        )
        yield RecipeChange(
            {"optimizer": Optimizer.ADAMW_8BIT},
            "AdamW with 8-bit moments",
            "moments in blocks of 8-bit codes: close to full precision, not equal",
            lossless=False,
        )


def on_the_host(recipe: Recipe) -> Iterator[RecipeChange]:
    """Yield what moves to the host's memory."""
    if recipe.offload is Offload.NONE:
        yield RecipeChange(
            {"offload": Offload.OPTIMIZER},
            "optimizer state in host memory",
            "the update runs on the CPU: seconds a step for each billion parameters",
        )
    if recipe.offload is not Offload.ALL:
        yield RecipeChange(
            {"offload": Offload.ALL},
            "parameters, gradients and optimizer state in host memory",
            "the update runs on the CPU and every gather comes over the bus: several times slower",
        )


# A change that lowers the peak by less than half a percent is not worth its cost in a set.
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

    def to_dict(self) -> AlternativeDict:
        """Return the alternative as the JSON object that other programs read."""
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
    shape: Shape, recipe: Recipe, hardware: Hardware, *, teacher: FrozenTeacher | None = None
) -> tuple[Alternative, ...]:
    """Return the changes of `recipe` that fit `hardware`, the least loss of fidelity first.

    Every change is tried alone; the lossless ones also together as far as each helps, and the later
    ones on top of them where alone they do not suffice. With a `teacher`, which a change may
    shard, every plan is that of both models.
    """
    search = AlternativeSearch(shape, recipe, hardware, teacher)
    harmless = [*teacher_placement(teacher, hardware), *lossless(recipe)]
    for candidate in harmless:
        search.offer(candidate)
    together = search.combine(harmless)
    lossy = list(smaller_state(recipe))
    for candidate in lossy:
        if not search.offer(candidate):
            search.offer(*together, candidate)
    smallest = lossy[:1]
    for candidate in on_the_host(recipe):
        if not (search.offer(candidate) or search.offer(*together, candidate)):
            search.offer(*together, *smallest, candidate)
    return tuple(search.found)


def refused_by_host(
    shape: Shape, recipe: Recipe, hardware: Hardware, *, teacher: FrozenTeacher | None = None
) -> tuple[Alternative, ...]:
    """Return the offloads that the host does not hold, with what they would take of it."""
    search = AlternativeSearch(shape, recipe, hardware, teacher)
    refused = []
    for candidate in on_the_host(recipe):
        result = search.plan(candidate.changes)
        if result.host_verdict is Verdict.DOES_NOT_FIT:
            changes = _plain(candidate.changes)
            refused.append(
                Alternative(changes, candidate.change, candidate.costs, candidate.lossless, result)
            )
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


class AlternativeSearch:
    """Plan one job under sets of changes and keep the sets that fit."""

    def __init__(
        self, shape: Shape, recipe: Recipe, hardware: Hardware, teacher: FrozenTeacher | None
    ) -> None:
        self.shape, self.recipe, self.hardware, self.teacher = shape, recipe, hardware, teacher
        self.found: list[Alternative] = []
        self._tried: dict[tuple[Recipe, Placement | None], Plan] = {}
        self._base = self.plan({})

    def offer(self, *candidates: RecipeChange) -> bool:
        """Keep the set if it fits and takes less than the unchanged recipe; return whether it fits."""
        changes = _merged(candidates)
        if self._setting(changes) in self._tried:
            return self.plan(changes).runs
        return self._keep(candidates)

    def combine(self, candidates: list[RecipeChange]) -> tuple[RecipeChange, ...]:
        """Add changes in order as long as each lowers the peak further; keep every set that fits."""
        taken: tuple[RecipeChange, ...] = ()
        lowest = self._base.peak_bytes
        for candidate in candidates:
            peak = self.plan(_merged((*taken, candidate))).peak_bytes
            if peak > lowest * _WORTHWHILE:
                continue
            taken, lowest = (*taken, candidate), peak
            # A change may replace the one before: half a micro-batch and a quarter are a quarter.
            if len(taken) > 1 and _merged(taken) != _merged((candidate,)):
                self._keep(taken)
        return taken

    def _keep(self, candidates: tuple[RecipeChange, ...]) -> bool:
        changes = _merged(candidates)
        result = self.plan(changes)
        if not result.runs or not self._saves_host_or_device(result):
            return False
        self.found.append(
            Alternative(
                changes=_plain(changes),
                change="; ".join(candidate.change for candidate in candidates),
                costs="; ".join(candidate.costs for candidate in candidates),
                lossless=all(candidate.lossless for candidate in candidates),
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
            return False  # whether the host holds it is unknown
        relieved = not self._base.runs and self._base.verdict is not Verdict.DOES_NOT_FIT
        return relieved or result.peak_bytes < self._base.peak_bytes


def _merged(candidates: tuple[RecipeChange, ...]) -> Changes:
    changes: Changes = {}
    for candidate in candidates:
        changes |= candidate.changes
    return changes


def _plain(changes: Changes) -> Changes:
    return {name: str(v) if hasattr(v, "value") else v for name, v in changes.items()}
