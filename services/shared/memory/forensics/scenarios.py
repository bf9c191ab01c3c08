"""Scenarios of how the job may have run, each tested against the message by its planned timeline.

A scenario survives when its timeline prints the message for some number of tokens
(`token_solver`). Tokens per rank are solved for where they are not given; a given micro-batch is an
upper bound, since texts are padded only to the longest of their batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics.case_to_plan import (
    hardware_of,
    recipe_of,
    state_precision,
    viewed,
)
from services.shared.memory.forensics.diagnosis import Cause, Hypothesis, Strength
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import FailurePhase, Framework, count_listed_devices
from services.shared.memory.forensics.matching.candidates import Match
from services.shared.memory.forensics.matching.rounding import Rounding, is_segment_size
from services.shared.memory.forensics.other_trainings import (
    ZERO_STAGES,
    Scenario,
    adapter_scenarios,
    zero_scenarios,
)
from services.shared.memory.forensics.token_solver import (
    TOKENS_GRID,
    TYPICAL_TOKENS,
    MomentKey,
    Moments,
    Solution,
    find_tokens,
    printed_moments,
    scaling_grids,
)
from services.shared.memory.forensics.unsharded_scenarios import no_unit, wrapped_replica
from services.shared.memory.oom_log.message_formats import Backend
from services.shared.memory.oom_log.message_parser import PrintedSize
from services.shared.memory.planning.ledger import PlanPhase, Point
from services.shared.memory.planning.plan import Plan, plan
from services.shared.memory.planning.plan_contract import Verdict
from services.shared.memory.recipe import (
    Optimizer,
    OptimizerImpl,
    Precision,
    Sharding,
    Wrap,
)
from services.shared.memory.sizes import format_size


def can_compare_timelines(evidence: Evidence) -> bool:
    """Return whether message and case suffice to compare timelines with them."""
    shape, message = evidence.shape, evidence.message
    if shape is None or message is None or message.requested is None:
        return False
    sure = any(c.match is Match.EXACT and not c.ambiguous for c in evidence.candidates)
    # No timeline holds the logits of a language model: then the request must match a known tensor.
    complete = not shape.language_head and not is_segment_size(
        message.requested, _rounding(evidence)
    )
    return (
        message.allocated is not None
        and (sure or complete)
        and (evidence.framework in _SHARDED or _replica_of_a_known_kind(evidence))
        and not evidence.offloads
        and hardware_of(evidence) is not None
        and evidence.phase not in (FailurePhase.LOAD, FailurePhase.SAVE, FailurePhase.EVALUATE)
    )


_SHARDED = (Framework.FSDP1, Framework.FSDP2, Framework.ZERO3)


def _replica_of_a_known_kind(evidence: Evidence) -> bool:
    """Return whether every rank holds all weights, with state that a timeline follows: adapters, or ZeRO."""
    if evidence.framework in (Framework.ZERO1, Framework.ZERO2):
        return True
    return evidence.trains_adapters and evidence.framework in (Framework.DDP, Framework.NONE)


def hypotheses_from_timelines(evidence: Evidence) -> tuple[Hypothesis, ...]:
    """Return every scenario of the case as a hypothesis, survivors first.

    Empty where the numbers do not suffice, and where no scenario explains the message.
    """
    if not can_compare_timelines(evidence):
        return ()
    found = [_test_scenario(evidence, scenario) for scenario in _scenarios_of(evidence)]
    if evidence.shards_parameters and not evidence.trains_adapters:
        found += [wrapped_replica(evidence), no_unit(evidence)]
    answers = [answer for answer in found if answer is not None]
    if not any(answer.strength is not Strength.EXCLUDED for answer in answers):
        return ()
    return tuple(sorted(answers, key=lambda a: (-a.strength, bool(a.objections))))


def _scenarios_of(evidence: Evidence) -> Iterator[Scenario]:
    if evidence.trains_adapters:
        return adapter_scenarios(evidence)
    if evidence.framework in ZERO_STAGES:
        return zero_scenarios(evidence)
    return _scenarios(evidence)


def _scenarios(evidence: Evidence) -> Iterator[Scenario]:
    """Yield the configured scenario, and those known to happen unnoticed."""
    case, stated = evidence.case, evidence.optimizer_impl
    single = {"accumulate": 1, "reduce_each": True}
    once = {} if case.accumulate else single
    state = state_precision(evidence)
    small = {**once, "optimizer_impl": stated or OptimizerImpl.FUSED}
    if stated in (None, OptimizerImpl.FUSED, OptimizerImpl.FOR_LOOP):
        kind = stated or OptimizerImpl.FUSED
        yield Scenario(
            f"sharded, {state} state, optimizer without temporaries (fused)",
            _state_cause(evidence),
            {**once, "optimizer_impl": kind},
        )
    if stated in (None, OptimizerImpl.FOREACH):
        foreach = {**once, "optimizer_impl": OptimizerImpl.FOREACH}
        what = f"sharded, {state} state, multi-tensor (foreach) optimizer"
        yield Scenario(what, Cause.OPTIMIZER_TEMPORARIES, foreach)
    if (case.accumulate is None or case.accumulate > 1) and not case.optimizer_in_backward:
        yield Scenario(
            "sharded, gradient accumulation without reduction (no_sync)",
            Cause.CAPACITY,
            {**small, "accumulate": case.accumulate or 2, "reduce_each": False},
        )
    if evidence.sharding is not Sharding.GRAD_OP:
        by_environment = evidence.framework is Framework.FSDP1
        yield Scenario(
            "SHARD_GRAD_OP: parameters stay gathered until backward",
            Cause.CAPACITY,
            {**small, "sharding": Sharding.GRAD_OP},
            caveat="only if FSDP_SHARDING_STRATEGY is set in the environment" * by_environment,
        )
    if case.parameters is None and evidence.precision.parameters is None:
        halves = {**small, "parameters": Precision.BFLOAT16, "upcast_after_wrap": False}
        yield Scenario("sharded, bfloat16 state", Cause.CAPACITY, halves)
    if case.activation_checkpointing is None:
        yield Scenario(
            "sharded, without activation checkpointing",
            Cause.LOGITS_OR_ACTIVATIONS,
            {**small, "activation_checkpointing": False},
        )
    yield Scenario(
        "wrap too coarse: the whole model is one unit",
        Cause.WRAP_TOO_COARSE,
        {**small, "wrap": Wrap.ROOT},
    )
    listed = count_listed_devices(case.free_text)
    if listed and listed != evidence.ranks:
        yield Scenario(
            f"sharded over {listed} ranks, the cards that the case lists",
            _state_cause(evidence),
            {**once, "optimizer_impl": OptimizerImpl.FUSED},
            ranks=listed,
        )


def _state_cause(evidence: Evidence) -> Cause:
    """Return FP32_UPCAST where float32 was not configured and 2-byte state would fit, else CAPACITY."""
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
    try:
        recipe, view = viewed(evidence, recipe_of(evidence, **changes), hardware.ranks)
        return plan(shape, recipe, hardware, view=view)
    except InvalidInput:
        return None


def _test_scenario(evidence: Evidence, scenario: Scenario) -> Hypothesis | None:
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
    best = solutions[0]
    key, held = best.key, best.held
    where = _moment_name(key.phase, key.step, key.layer)
    reasons = [
        f"{where}: requests {format_size(held.request)} ({key.what}) with "
        f"{format_size(held.allocated)} allocated {_tokens_text(best)}, and nothing before it needed more"
    ]
    if len(solutions) > 1:
        others = ", ".join(
            f"{_tokens_text(s)} (layer {s.key.layer})" for s in solutions[1:] if s.tokens
        )
        reasons += [f"also {others}"] if others else []
    objections = [scenario.caveat] if scenario.caveat else []
    objections += _check_stated_step(evidence, key.step, reasons)
    updating = key.phase is PlanPhase.OPTIMIZER_STEP and evidence.framework in ZERO_STAGES
    return Hypothesis(
        Cause.OPTIMIZER_TEMPORARIES if updating else scenario.cause,
        scenario.what,
        Strength.POSSIBLE,
        held.allocated,
        held.request,
        tuple(reasons),
        tuple(objections),
        tuple(s.tokens for s in solutions if s.tokens),
        key.step,
        where,
    )


def _tokens_text(solution: Solution) -> str:
    return f"at {solution.tokens:,} tokens a rank" if solution.tokens else "whatever the tokens"


def _moment_name(phase: PlanPhase, step: int, layer: int | None) -> str:
    place = f"step {step} {phase}" if step else str(phase)
    return place if layer is None else f"{place}, layer {layer}"


def _check_stated_step(evidence: Evidence, step: int, reasons: list[str]) -> list[str]:
    words = (evidence.case.phase or "").lower()
    stated = evidence.case.step
    if stated is None and "first step" in words:
        stated = 1
    if stated is None or step < 1 or evidence.log.completed_steps is not None:
        return []  # a progress bar is decisive already
    first = stated <= 1
    if first == (step == 1):
        reasons.append(f"agrees with the reported step {stated}")
        return []
    return [f"the case reports step {stated}, this happens in step {step} or later"]


def _excluded(evidence: Evidence, scenario: Scenario) -> Hypothesis | None:
    tokens = _most_tokens(evidence, TYPICAL_TOKENS)
    planned = _at_tokens(evidence, scenario, evidence.shapes[0], tokens)
    if planned is None:
        return None
    requested, allocated = _printed(evidence)
    crossing = planned.first_exceeding(requested.size_bytes + allocated.size_bytes)
    if crossing is None:
        text = (
            f"its peak, {format_size(planned.peak_bytes)}, is below the refused "
            f"{format_size(requested.size_bytes + allocated.size_bytes)}"
        )
        return Hypothesis(scenario.cause, scenario.what, Strength.EXCLUDED, objections=(text,))
    point = crossing.point
    where = _moment_name(point.phase, point.step, point.layer)
    text = (
        f"{where}: fails requesting {format_size(crossing.request_bytes)} ({crossing.what}) with "
        f"{format_size(crossing.allocated_bytes)} allocated"
    )
    if not _ever_asks(planned, evidence, requested):
        text += f"; it never requests {format_size(requested.size_bytes)}"
    return Hypothesis(
        scenario.cause,
        scenario.what,
        Strength.EXCLUDED,
        crossing.allocated_bytes,
        crossing.request_bytes,
        objections=(text,),
        where=where,
    )


def _ever_asks(planned: Plan, evidence: Evidence, requested: PrintedSize) -> bool:
    return bool(printed_moments(planned.timeline, requested, _rounding(evidence)))


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


def _solve(evidence: Evidence, scenario: Scenario, shape: Shape) -> list[Solution]:
    """Return the moments of a scenario that print the message, each with its number of tokens."""
    requested, allocated = _printed(evidence)
    rounding = _rounding(evidence)
    most = _most_tokens(evidence, TOKENS_GRID[-1])
    grid = sorted({tokens for tokens in (*TOKENS_GRID, most) if tokens <= most})
    timelines: dict[int, tuple[Point, ...]] = {}
    known: dict[int, Moments] = {}

    def timeline_at(tokens: int) -> tuple[Point, ...]:
        if tokens not in timelines:
            planned = _at_tokens(evidence, scenario, shape, tokens)
            timelines[tokens] = planned.timeline if planned else ()
        return timelines[tokens]

    def moments_at(tokens: int) -> Moments:
        if tokens not in known:
            moments = printed_moments(timeline_at(tokens), requested, rounding)
            known[tokens] = {k: held for k, held in moments.items() if _matches_stated(evidence, k)}
        return known[tokens]

    solutions = find_tokens(moments_at, grid, allocated)
    if solutions:
        return solutions
    typical = (timeline_at(TYPICAL_TOKENS), timeline_at(2 * TYPICAL_TOKENS))
    for ends in scaling_grids(*typical, requested, most=most):
        solutions += find_tokens(moments_at, ends, allocated)
    return solutions


_STATED_PHASES = {
    FailurePhase.FORWARD: PlanPhase.FORWARD,
    FailurePhase.BACKWARD: PlanPhase.BACKWARD,
    FailurePhase.OPTIMIZER_STEP: PlanPhase.OPTIMIZER_STEP,
    FailurePhase.WRAP: PlanPhase.WRAP,
}


def _matches_stated(evidence: Evidence, key: MomentKey) -> bool:
    """Return whether a moment agrees with the traceback and the progress bar."""
    phase = _STATED_PHASES.get(evidence.phase) if evidence.phase else None
    finished = evidence.log.completed_steps
    if finished is not None and key.step and (finished == 0) != (key.step == 1):
        return False
    return phase is None or key.phase is phase
