"""What each way of running the job would have printed, and which of them the message excludes.

A message gives two numbers: bytes allocated, and bytes requested. Each scenario has a timeline from
the plan. It survives when some moment of it asks for the printed request with the printed bytes
allocated, and no moment before it needed more than the two together: a card that held an earlier,
higher moment would not have refused this one. The tokens of a rank are solved where they were not
told; a told micro-batch is an upper bound, since texts are padded to the longest of a batch only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from services.shared.memory.assumed import hardware_of, recipe_of
from services.shared.memory.catalogue import Backend
from services.shared.memory.diagnosis import Cause, Hypothesis, Strength
from services.shared.memory.errors import InvalidInput
from services.shared.memory.evidence import Evidence
from services.shared.memory.hardware import Hardware
from services.shared.memory.matching import Match, Role, Rounding
from services.shared.memory.messages import PrintedSize
from services.shared.memory.plan import Plan, Verdict, plan
from services.shared.memory.recipe import (
    Engine,
    Optimizer,
    OptimizerImpl,
    Precision,
    Sharding,
    Wrap,
)
from services.shared.memory.shape import Shape
from services.shared.memory.sizes import MIB, format_size
from services.shared.memory.timeline import Phase, Point
from services.shared.memory.wording import FailurePhase, Framework, cards_listed

_LONGEST_TOKENS = 1 << 14
_GRID = (64, 512, 1024, 2048, 4096, 8192, 16384)
_TYPICAL_TOKENS = 2048
_SECANT_STEPS = 4
# Between two computed numbers of tokens the highest earlier point is interpolated; it is piecewise
# linear, so a moment this far above the limit there is above it everywhere in between.
_CLEARLY_ABOVE = 1.02
_COARSEST_ROUNDING = 20 * MIB  # the allocator's rounding adds less than a large segment


@dataclass(frozen=True)
class Scenario:
    """One way of running the job; `caveat` is what must be true besides for it to happen."""

    what: str
    cause: Cause
    changes: dict[str, Any]
    ranks: int | None = None
    caveat: str = ""


@dataclass(frozen=True)
class Solution:
    """A moment of a scenario that would have printed the message."""

    tokens: int
    step: int
    layer: int | None
    phase: Phase
    what: str
    allocated_bytes: int
    request_bytes: int


def can_compute(evidence: Evidence) -> bool:
    """Tell whether the message and the case suffice to hold timelines against each other."""
    sure = [c for c in evidence.candidates if c.match is Match.EXACT and not c.ambiguous]
    return (
        evidence.message is not None
        and evidence.message.allocated is not None
        and bool(sure)
        and evidence.shape is not None
        and evidence.framework in (Framework.FSDP1, Framework.FSDP2)
        and not evidence.offloads
        and hardware_of(evidence) is not None
        and evidence.phase not in (FailurePhase.LOAD, FailurePhase.SAVE, FailurePhase.EVALUATE)
    )


def from_timelines(evidence: Evidence) -> tuple[Hypothesis, ...]:
    """Return every scenario of the case as a hypothesis, survivors first.

    Empty where the numbers do not suffice, and where no scenario explains the message.
    """
    if not can_compute(evidence):
        return ()
    found = [_weigh(evidence, scenario) for scenario in _scenarios(evidence)]
    found.append(_replica(evidence))
    answers = [answer for answer in found if answer is not None]
    if not any(answer.strength is not Strength.EXCLUDED for answer in answers):
        return ()
    return tuple(sorted(answers, key=lambda answer: -answer.strength))


def _scenarios(evidence: Evidence) -> Iterator[Scenario]:
    """Yield the configured way, and the ways a job is known to run differently unnoticed."""
    case, told = evidence.case, evidence.optimizer_impl
    single = {"accumulate": 1, "reduce_each": True}
    once = {} if case.accumulate else single
    if told in (None, OptimizerImpl.FUSED, OptimizerImpl.FOR_LOOP):
        kind = told or OptimizerImpl.FUSED
        yield Scenario(
            _state_text(evidence, "an optimizer without temporaries"),
            _state_cause(evidence),
            {**once, "optimizer_impl": kind},
        )
    if told in (None, OptimizerImpl.FOREACH):
        foreach = {**once, "optimizer_impl": OptimizerImpl.FOREACH}
        what = _state_text(evidence, "the multi-tensor (foreach) optimizer")
        yield Scenario(what, Cause.OPTIMIZER_TEMPORARIES, foreach)
    if (case.accumulate is None or case.accumulate > 1) and not case.optimizer_in_backward:
        yield Scenario(
            "sharded, gradient accumulation without reduction (no_sync): whole gradients stay",
            Cause.CAPACITY,
            {"accumulate": case.accumulate or 2, "reduce_each": False},
        )
    if evidence.sharding is not Sharding.GRAD_OP:
        by_environment = evidence.framework is Framework.FSDP1
        yield Scenario(
            "SHARD_GRAD_OP: parameters stay gathered from forward to backward",
            Cause.CAPACITY,
            {**once, "sharding": Sharding.GRAD_OP},
            caveat="only if the environment sets FSDP_SHARDING_STRATEGY" * by_environment,
        )
    if case.parameters is None and evidence.precision.parameters is None:
        halves = {**once, "parameters": Precision.BFLOAT16, "upcast_after_wrap": False}
        yield Scenario("sharded, bfloat16 state", Cause.CAPACITY, halves)
    if case.activation_checkpointing is None:
        yield Scenario(
            "sharded, without activation checkpointing",
            Cause.LOGITS_OR_ACTIVATIONS,
            {**once, "activation_checkpointing": False},
        )
    yield Scenario(
        "wrap too coarse: one unit for the whole model",
        Cause.WRAP_TOO_COARSE,
        {**once, "wrap": Wrap.ROOT},
    )
    whole = {"sharding": Sharding.NONE, "engine": Engine.DDP, **once, **_untouched(evidence)}
    yield Scenario(
        "no sharding unit at all (FSDP units = 0): a replica on every rank",
        Cause.NOT_SHARDED,
        whole,
    )
    listed = cards_listed(case.words)
    if listed and listed != evidence.ranks:
        yield Scenario(
            f"sharded over the {listed} cards that the case lists",
            _state_cause(evidence),
            {**once, "optimizer_impl": OptimizerImpl.FUSED},
            ranks=listed,
        )


def _untouched(evidence: Evidence) -> dict[str, Any]:
    """Nobody raises the checkpoint's dtype where FSDP is not active."""
    if evidence.case.parameters or evidence.precision.parameters:
        return {}
    return {"parameters": Precision.BFLOAT16}


def _state_text(evidence: Evidence, optimizer: str) -> str:
    precision = recipe_of(evidence).parameters
    return f"sharded, {precision} parameters, gradients and moments, {optimizer}"


def _state_cause(evidence: Evidence) -> Cause:
    """Blame the upcast where float32 was not asked for and 2-byte state would fit."""
    if evidence.case.parameters is Precision.FLOAT32:
        return Cause.CAPACITY
    if evidence.precision.parameters is not None or evidence.case.parameters is not None:
        return Cause.CAPACITY
    halved = plan_with(evidence, parameters=Precision.BFLOAT16, optimizer=Optimizer.ADAMW_BF16)
    if halved is None or halved.verdict is not Verdict.FITS:
        return Cause.CAPACITY
    return Cause.FP32_UPCAST


def plan_with(
    evidence: Evidence, *, ranks: int | None = None, shape: Shape | None = None, **changes: Any
) -> Plan | None:
    """Return the plan of the case with `changes`, or None where it cannot be computed."""
    hardware, shape = hardware_of(evidence, ranks=ranks), shape or evidence.shape
    if hardware is None or shape is None:
        return None
    return _planned(shape, hardware, lambda: recipe_of(evidence, **changes))


def _planned(shape: Shape, hardware: Hardware, recipe: Callable[[], Any]) -> Plan | None:
    try:
        return plan(shape, recipe(), hardware)
    except InvalidInput:
        return None


def _weigh(evidence: Evidence, scenario: Scenario) -> Hypothesis | None:
    solutions: list[Solution] = []
    for shape in evidence.shapes:
        solutions += _solve(evidence, scenario, shape)
        if solutions:
            break
    if solutions:
        return _survivor(evidence, scenario, solutions)
    return _excluded(evidence, scenario)


def _survivor(
    evidence: Evidence, scenario: Scenario, solutions: list[Solution]
) -> Hypothesis | None:
    solutions = sorted(solutions, key=lambda s: abs(s.tokens - _TYPICAL_TOKENS))
    best = solutions[0]
    place = f"layer {best.layer}, " if best.layer is not None else ""
    reasons = [
        f"asks for {format_size(best.request_bytes)} ({best.what}) with "
        f"{format_size(best.allocated_bytes)} allocated: step {best.step} {best.phase}, {place}"
        f"{best.tokens:,} tokens a rank, and nothing before it needed more"
    ]
    if len(solutions) > 1:
        others = ", ".join(f"{s.tokens:,} (layer {s.layer})" for s in solutions[1:4])
        reasons.append(f"also with {others} tokens")
    objections = [scenario.caveat] if scenario.caveat else []
    objections += _told_step(evidence, best, reasons)
    return Hypothesis(
        scenario.cause,
        scenario.what,
        Strength.POSSIBLE,
        best.allocated_bytes,
        best.request_bytes,
        tuple(reasons),
        tuple(objections),
        tuple(s.tokens for s in solutions[:4]),
        best.step,
    )


def _told_step(evidence: Evidence, best: Solution, reasons: list[str]) -> list[str]:
    words = (evidence.case.phase or "").lower()
    told = evidence.case.step
    if told is None and "first step" in words:
        told = 1
    if told is None or best.step < 1:
        return []
    first = told <= 1
    if first == (best.step == 1):
        reasons.append(f"fits the told step {told}")
        return []
    return [f"the case speaks of step {told}, this is the backward of step {best.step} or later"]


def _excluded(evidence: Evidence, scenario: Scenario) -> Hypothesis | None:
    tokens = _most_tokens(evidence, _TYPICAL_TOKENS)
    planned = _at_tokens(evidence, scenario, evidence.shapes[0], tokens)
    if planned is None:
        return None
    asked, allocated = _printed(evidence)
    crossing = planned.first_past(asked.size_bytes + allocated.size_bytes)
    if crossing is None:
        text = (
            f"its peak of {format_size(planned.peak_bytes)} stays below the "
            f"{format_size(asked.size_bytes + allocated.size_bytes)} that were refused"
        )
        return Hypothesis(scenario.cause, scenario.what, Strength.EXCLUDED, objections=(text,))
    point = crossing.point
    place = f"{point.phase}" + (f" of step {point.step}" if point.step else "")
    text = (
        f"dies in {place} asking {format_size(crossing.request_bytes)} ({crossing.what}) with "
        f"{format_size(crossing.allocated_bytes)} allocated"
    )
    if not _ever_asks(planned, evidence, asked):
        text += f"; it never asks for {format_size(asked.size_bytes)}"
    return Hypothesis(
        scenario.cause,
        scenario.what,
        Strength.EXCLUDED,
        crossing.allocated_bytes,
        crossing.request_bytes,
        objections=(text,),
    )


def _ever_asks(planned: Plan, evidence: Evidence, asked: PrintedSize) -> bool:
    rounding = _rounding(evidence)
    return any(
        asked.covers(rounding.driver_request(moment.request_bytes))
        for point in planned.timeline
        for moment in point.rising
    )


def _rounding(evidence: Evidence) -> Rounding:
    assert evidence.message is not None
    backend = evidence.message.backend
    known = Backend.CUDA if backend is Backend.UNKNOWN else backend
    return Rounding(known, evidence.log.power2_divisions)


def _printed(evidence: Evidence) -> tuple[PrintedSize, PrintedSize]:
    message = evidence.message
    assert message is not None
    assert message.requested is not None
    assert message.allocated is not None
    return message.requested, message.allocated


def _most_tokens(evidence: Evidence, unknown: int) -> int:
    case = evidence.case
    if case.sequence_length is None:
        return unknown
    return case.sequence_length * (case.micro_batch or 1)


def _at_tokens(evidence: Evidence, scenario: Scenario, shape: Shape, tokens: int) -> Plan | None:
    changes = {**scenario.changes, "micro_batch": 1, "sequence_length": tokens}
    return plan_with(evidence, ranks=scenario.ranks, shape=shape, **changes)


Key = tuple[int, int, str, int | None, str]
Moments = dict[Key, tuple[int, int, int]]  # allocated, request, the most that came before


def _moments(planned: Plan, evidence: Evidence, asked: PrintedSize) -> Moments:
    """Return the moments that print the request, with the highest point before each of them."""
    rounding = _rounding(evidence)
    least = asked.size_bytes - asked.tolerance_bytes - _COARSEST_ROUNDING
    most = asked.size_bytes + asked.tolerance_bytes
    found: Moments = {}
    before = 0
    for point in planned.timeline:
        if point.phase in (Phase.EVALUATION, Phase.EXPORT):
            break
        for moment in point.rising:
            live, request = point.base_bytes + moment.live_bytes, moment.request_bytes
            if least <= request <= most and asked.covers(rounding.driver_request(request)):
                found.setdefault(_key(point, moment.what), (live - request, request, before))
            before = max(before, live)
    return found


def _key(point: Point, what: str) -> Key:
    return (point.step, point.micro_batch, str(point.phase), point.layer, what)


def _solve(evidence: Evidence, scenario: Scenario, shape: Shape) -> list[Solution]:
    """Return the moments of a scenario that print the message, with the tokens that make them."""
    asked, allocated = _printed(evidence)
    most = _most_tokens(evidence, _LONGEST_TOKENS)
    grid = sorted({tokens for tokens in (*_GRID, most) if tokens <= most})
    tables: dict[int, Moments] = {}

    def table(tokens: int) -> Moments:
        if tokens not in tables:
            planned = _at_tokens(evidence, scenario, shape, tokens)
            tables[tokens] = _moments(planned, evidence, asked) if planned else {}
        return tables[tokens]

    keys = _within_reach(table(grid[0]), table(grid[-1]), allocated)
    solutions = []
    for key in keys:
        tokens = _tokens_for(key, table, grid, allocated)
        if tokens is None:
            continue
        held, request, before = table(tokens)[key]
        if before < allocated.size_bytes + allocated.tolerance_bytes + request:
            step, _, phase, layer, what = key
            solutions.append(Solution(tokens, step, layer, Phase(phase), what, held, request))
    return _first_of_each_step(solutions)


def _within_reach(lowest: Moments, highest: Moments, allocated: PrintedSize) -> list[Key]:
    """Return the moments that some number of tokens may bring to `allocated`.

    What is alive only grows with the tokens: a moment above the target with the fewest, below it
    with the most, or behind a higher point with the fewest, never prints the message.
    """
    target, slack = allocated.size_bytes, allocated.tolerance_bytes
    keys = []
    for key, (held, request, before) in lowest.items():
        most = highest[key][0] if key in highest else target
        if held <= target + slack and most >= target - slack and before < target + slack + request:
            keys.append(key)
    return sorted(keys, key=str)


def _first_of_each_step(solutions: list[Solution]) -> list[Solution]:
    """Keep one solution for each step and layer: the same moment of two micro-batches is one."""
    kept: dict[tuple[int | None, int], Solution] = {}
    for solution in sorted(solutions, key=lambda s: (s.step, s.tokens)):
        kept.setdefault((solution.layer, solution.tokens), solution)
    return list(kept.values())


def _tokens_for(
    key: Key, table: Callable[[int], Moments], grid: list[int], allocated: PrintedSize
) -> int | None:
    """Return the tokens at which the moment `key` has `allocated` bytes, or None."""
    known = [(tokens, *table(tokens)[key]) for tokens in grid if key in table(tokens)]
    for low, high in pairwise(known):
        tokens = _between(key, table, low, high, allocated)
        if tokens is not None:
            return tokens
    return next((row[0] for row in known if allocated.covers(row[1])), None)


Row = tuple[int, int, int, int]  # tokens, allocated, request, the most that came before


def _between(
    key: Key, table: Callable[[int], Moments], low: Row, high: Row, allocated: PrintedSize
) -> int | None:
    """Search between two numbers of tokens by secants: a moment's bytes are near linear in them."""
    target = allocated.size_bytes
    for _ in range(_SECANT_STEPS):
        if not low[1] < target < high[1]:
            return None
        share = (target - low[1]) / (high[1] - low[1])
        limit = target + allocated.tolerance_bytes + high[2]
        if low[3] + share * (high[3] - low[3]) > _CLEARLY_ABOVE * limit:
            return None
        tokens = round(low[0] + share * (high[0] - low[0]))
        if key not in table(tokens):
            return None
        middle = (tokens, *table(tokens)[key])
        if allocated.covers(middle[1]):
            return tokens
        low, high = (middle, high) if middle[1] < target else (low, middle)
    return None


def _replica(evidence: Evidence) -> Hypothesis | None:
    """The whole model lay on the card, then FSDP wrapped it unit by unit beside the original.

    Nothing in it can be tuned: each unit asks for its flat buffer, and gives back the original less
    its share.
    """
    _, allocated = _printed(evidence)
    shape, ranks = evidence.shapes[-1], evidence.ranks or 1
    units = [c for c in evidence.candidates if c.role is Role.LAYER and c.divided_by == 1]
    if not units or evidence.framework is not Framework.FSDP1:
        return None
    width = 2
    whole = shape.num_parameters * width
    layer = shape.layers[-1].elements * width
    given_back = layer - layer // ranks
    steps = [whole - index * given_back for index in range(shape.num_layers)]
    nearest = min(steps, key=lambda held: abs(held - allocated.size_bytes))
    survives = allocated.covers(nearest) and nearest == steps[0]
    what = "the whole model lay on the card before FSDP wrapped it (not sharded)"
    text = (
        f"wrapping would ask for {format_size(layer)} with {format_size(steps[0])} allocated, then "
        f"{format_size(steps[1])}: {format_size(allocated.size_bytes)} is none of them, and "
        "nothing there can be tuned"
    )
    if survives:
        reason = f"the whole model in 2 bytes is {format_size(whole)}, as printed"
        return Hypothesis(
            Cause.NOT_SHARDED, what, Strength.POSSIBLE, steps[0], layer, reasons=(reason,)
        )
    return Hypothesis(
        Cause.NOT_SHARDED, what, Strength.EXCLUDED, steps[0], layer, objections=(text,)
    )
