"""How many devices a model needs, and which model a machine holds: the plan asked the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TypedDict

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.hardware import Hardware
from services.shared.memory.planning.alternatives import Alternative, AlternativeSearch, merged
from services.shared.memory.planning.plan import max_shard_ranks, plan
from services.shared.memory.planning.plan_contract import Changes, Verdict
from services.shared.memory.planning.recipe_changes import (
    RecipeChange,
    lossless_changes,
    optimizer_changes,
)
from services.shared.memory.recipe import Optimizer, Recipe

# How close optimizers with less state are to AdamW in float32: an exact master, one of 24 bits, one of
# bfloat16, another rule.
_FIDELITY = (
    Optimizer.ADAMW_8BIT,
    Optimizer.ADAMW_SPLIT24,
    Optimizer.ADAMW_BF16,
    Optimizer.ADAFACTOR,
)
# Beyond this nothing is searched: more devices than a job may have (`resources.ranks`).
MOST_RANKS = 1024


class FitDict(TypedDict):
    """A model on the devices that hold it; `ranks` devices on `nodes` nodes."""

    model: str
    num_parameters: int
    ranks: int
    nodes: int
    change: str
    changes: Changes
    costs: str
    lossless: bool
    peak_bytes: int
    budget_bytes: int
    verdict: Verdict


def fewest_ranks(shape: Shape, recipe: Recipe, hardware: Hardware) -> list[Alternative]:
    """Return the fewest devices of `hardware`'s kind that hold the job, the least loss of fidelity first.

    First the recipe as it is, then with what computes the same numbers, then with each optimizer that
    keeps less state; a recipe is left out where one before it needs no more devices. The host is not
    divided: it is another one for every node. Offloads are left out for the same reason.
    """
    found: list[Alternative] = []
    for candidates in _levels(shape, recipe, hardware):
        fit = _fewest(shape, recipe, hardware, candidates)
        if fit is not None and all(
            fit.plan.hardware.ranks < other.plan.hardware.ranks for other in found
        ):
            found.append(fit)
    return found


def largest_models(
    shapes: Iterable[Shape], recipe: Recipe, hardware: Hardware
) -> list[tuple[Shape, Alternative]]:
    """Return the largest of `shapes` that `hardware` holds, the least loss of fidelity first.

    A recipe is left out where one before it holds as large a model.
    """
    ordered = sorted(shapes, key=lambda shape: -shape.num_parameters)
    found: list[tuple[Shape, Alternative]] = []
    for level in range(2 + len(list(optimizer_changes(recipe)))):
        for shape in ordered:
            if found and shape.num_parameters <= found[-1][0].num_parameters:
                break
            fit = _at(shape, recipe, hardware, level)
            if fit is not None:
                found.append((shape, fit))
                break
    return found


def num_nodes(fit: Alternative, *, devices_per_node: int) -> int:
    """Return the nodes that hold the devices of a plan."""
    return -(-fit.plan.hardware.ranks // devices_per_node)


def to_dict(fit: Alternative, *, devices_per_node: int) -> FitDict:
    """Return a fit as the JSON object that other programs read."""
    return {
        "model": fit.plan.shape.name,
        "num_parameters": fit.plan.shape.num_parameters,
        "ranks": fit.plan.hardware.ranks,
        "nodes": num_nodes(fit, devices_per_node=devices_per_node),
        "change": fit.change,
        "changes": fit.changes,
        "costs": fit.costs,
        "lossless": fit.lossless,
        "peak_bytes": fit.plan.peak_bytes,
        "budget_bytes": fit.plan.budget_bytes,
        "verdict": fit.plan.verdict,
    }


def _levels(shape: Shape, recipe: Recipe, hardware: Hardware) -> Iterator[tuple[RecipeChange, ...]]:
    """Yield sets of changes, each keeping less of the asked recipe than the one before."""
    search = AlternativeSearch(shape, recipe, hardware, None)
    together = search.combine(list(lossless_changes(recipe)))
    yield ()
    yield together
    for candidate in sorted(
        optimizer_changes(recipe), key=lambda change: _FIDELITY.index(change.changes["optimizer"])
    ):
        yield (*together, candidate)


def _at(shape: Shape, recipe: Recipe, hardware: Hardware, level: int) -> Alternative | None:
    """Return how `hardware` holds `shape` with the changes of a level, or None."""
    if hardware.ranks > max_shard_ranks(shape):
        return None
    candidates = list(_levels(shape, recipe, hardware))[level]
    fit = _fit(shape, recipe, hardware, candidates)
    return fit if fit.plan.runs else None


def _fewest(
    shape: Shape, recipe: Recipe, hardware: Hardware, candidates: tuple[RecipeChange, ...]
) -> Alternative | None:
    """Return the fit on the fewest ranks, or None: found by bisection, as more ranks never take more."""
    without_host = replace(hardware, host_memory_bytes=None, ranks=1)

    def on(ranks: int) -> Alternative:
        return _fit(shape, recipe, replace(without_host, ranks=ranks), candidates)

    high = 1
    most = min(MOST_RANKS, max_shard_ranks(shape))
    while not on(high).plan.runs:
        if high == most:
            return None
        high = min(2 * high, most)
    low = high // 2  # does not fit, or is 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if on(middle).plan.runs else (middle, high)
    return on(high)


def _fit(
    shape: Shape, recipe: Recipe, hardware: Hardware, candidates: tuple[RecipeChange, ...]
) -> Alternative:
    changed = recipe.with_changes(merged(candidates))
    return Alternative.of(candidates, plan(shape, changed, hardware))
