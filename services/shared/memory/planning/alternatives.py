"""The alternatives of a job: the changes that make it fit, the least loss of fidelity first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.hardware import Hardware
from services.shared.memory.planning.frozen_teacher import FrozenTeacher
from services.shared.memory.planning.plan import Plan, plan
from services.shared.memory.planning.plan_contract import AlternativeDict, Changes, Verdict
from services.shared.memory.planning.recipe_changes import (
    TEACHER_PLACEMENT,
    RecipeChange,
    lossless_changes,
    offload_changes,
    optimizer_changes,
    teacher_changes,
)
from services.shared.memory.planning.timeline_views import TimelineView
from services.shared.memory.recipe import Offload, Recipe

# A change that lowers the peak by less than half a percent is not worth its cost in a set.
_WORTHWHILE = 0.995


@dataclass(frozen=True)
class Alternative:
    """A set of changes that fits: its plan, and what it costs.

    `changes` holds the fields of `Recipe` to replace, and TEACHER_PLACEMENT, as JSON values;
    `lossless` says that training computes the same numbers, up to the order of sums.
    """

    changes: Changes
    change: str
    costs: str
    lossless: bool
    plan: Plan

    @classmethod
    def of(cls, candidates: Sequence[RecipeChange], result: Plan) -> Alternative:
        """Return `candidates` taken together, with the plan that they lead to."""
        changes = merged(candidates).items()
        return cls(
            changes={name: str(v) if isinstance(v, Enum) else v for name, v in changes},
            change="; ".join(candidate.change for candidate in candidates),
            costs="; ".join(candidate.costs for candidate in candidates),
            lossless=all(candidate.lossless for candidate in candidates),
            plan=result,
        )

    def to_dict(self) -> AlternativeDict:
        """Return the alternative as the JSON object that other programs read."""
        return {
            "change": self.change,
            "changes": dict(self.changes),
            "peak_bytes": self.plan.peak_bytes,
            "peak_phase": self.plan.peak_phase,
            "verdict": self.plan.verdict,
            "host_peak_bytes": self.plan.host.peak_bytes,
            "host_verdict": self.plan.host_verdict,
            "lossless": self.lossless,
            "costs": self.costs,
        }


def alternatives(
    shape: Shape,
    recipe: Recipe,
    hardware: Hardware,
    *,
    teacher: FrozenTeacher | None = None,
    view: TimelineView | None = None,
) -> tuple[Alternative, ...]:
    """Return the changes of `recipe` that fit `hardware`, the least loss of fidelity first.

    Each change is tried alone; the lossless ones also in combination, as far as each lowers the peak;
    the others on top of that combination where they do not suffice alone. With a `teacher`, whose
    placement may change, every plan is that of both models; with a `view`, that of its way of training.
    """
    search = AlternativeSearch(shape, recipe, hardware, teacher, view)
    lossless = [*teacher_changes(teacher, hardware), *lossless_changes(recipe)]
    for candidate in lossless:
        search.offer(candidate)
    together = search.combine(lossless)
    lossy = list(optimizer_changes(recipe))
    for candidate in lossy:
        if not search.offer(candidate):
            search.offer(*together, candidate)
    smallest = lossy[:1]
    for candidate in offload_changes(recipe):
        if not (search.offer(candidate) or search.offer(*together, candidate)):
            search.offer(*together, *smallest, candidate)
    return tuple(search.found)


def refused_by_host(
    shape: Shape, recipe: Recipe, hardware: Hardware, *, teacher: FrozenTeacher | None = None
) -> tuple[Alternative, ...]:
    """Return the offloads for which the host has too little memory, with their plans."""
    search = AlternativeSearch(shape, recipe, hardware, teacher)
    refused = []
    for candidate in offload_changes(recipe):
        result = search.plan(candidate.changes)
        if result.host_verdict is Verdict.DOES_NOT_FIT:
            refused.append(Alternative.of((candidate,), result))
    return tuple(refused)


def choose(shape: Shape, recipe: Recipe, hardware: Hardware) -> Plan | None:
    """Return the plan of `recipe` where it fits, else of the first alternative, or None.

    At the same fidelity a plan that fits is preferred over a tight one.
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
    """Plans one job under sets of changes and collects the sets that fit."""

    def __init__(
        self,
        shape: Shape,
        recipe: Recipe,
        hardware: Hardware,
        teacher: FrozenTeacher | None,
        view: TimelineView | None = None,
    ) -> None:
        self.shape, self.recipe, self.hardware, self.teacher = shape, recipe, hardware, teacher
        self.view = view
        self.found: list[Alternative] = []
        self._tried: dict[tuple[Recipe, FrozenTeacher | None], Plan] = {}
        self._base = self.plan({})

    def offer(self, *candidates: RecipeChange) -> bool:
        """Add the set if it fits and takes less than the unchanged recipe; return whether it fits."""
        changes = merged(candidates)
        if self._changed(changes) in self._tried:
            return self.plan(changes).runs
        return self._add_if_it_fits(candidates)

    def combine(self, candidates: list[RecipeChange]) -> tuple[RecipeChange, ...]:
        """Return the changes, in order, that each lower the peak further; add every set that fits."""
        taken: tuple[RecipeChange, ...] = ()
        lowest = self._base.peak_bytes
        for candidate in candidates:
            peak = self.plan(merged((*taken, candidate))).peak_bytes
            if peak > lowest * _WORTHWHILE:
                continue
            taken, lowest = (*taken, candidate), peak
            # A change may override the previous one: a halved and then a quartered micro-batch.
            if len(taken) > 1 and merged(taken) != merged((candidate,)):
                self._add_if_it_fits(taken)
        return taken

    def _add_if_it_fits(self, candidates: tuple[RecipeChange, ...]) -> bool:
        changes = merged(candidates)
        result = self.plan(changes)
        if not result.runs or not self._is_an_improvement(result):
            return False
        self.found.append(Alternative.of(candidates, result))
        return True

    def plan(self, changes: Changes) -> Plan:
        """Return the plan of the job with `changes`."""
        changed = recipe, teacher = self._changed(changes)
        if changed not in self._tried:
            self._tried[changed] = plan(
                self.shape, recipe, self.hardware, teacher=teacher, view=self.view
            )
        return self._tried[changed]

    def _changed(self, changes: Changes) -> tuple[Recipe, FrozenTeacher | None]:
        own = {name: value for name, value in changes.items() if name != TEACHER_PLACEMENT}
        teacher = self.teacher
        if teacher is not None and TEACHER_PLACEMENT in changes:
            teacher = replace(teacher, placement=changes[TEACHER_PLACEMENT])
        return self.recipe.with_changes(own), teacher

    def _is_an_improvement(self, result: Plan) -> bool:
        if result.recipe.offload is not Offload.NONE and result.host_verdict is Verdict.UNKNOWN:
            return False  # the host may not have the memory
        relieved = not self._base.runs and self._base.verdict is not Verdict.DOES_NOT_FIT
        return relieved or result.peak_bytes < self._base.peak_bytes


def merged(candidates: Sequence[RecipeChange]) -> Changes:
    """Return the changes of all `candidates`; a later one overrides an earlier."""
    changes: Changes = {}
    for candidate in candidates:
        changes |= candidate.changes
    return changes
