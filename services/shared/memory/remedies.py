"""The changes that make a job fit, the least loss of fidelity first: the rungs that help, tried."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from services.shared.memory.beside import Beside, Placement
from services.shared.memory.hardware import Hardware
from services.shared.memory.model_shape import Shape
from services.shared.memory.plan import Plan, Verdict, plan, plan_distillation
from services.shared.memory.recipe import Offload, Recipe
from services.shared.memory.rungs import (
    TEACHER_PLACEMENT,
    Changes,
    Rung,
    beside,
    lossless,
    on_the_host,
    smaller_state,
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
