"""Read a failure: gather the evidence, weigh every explanation, say what decides and what helps."""

from __future__ import annotations

from dataclasses import replace

from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnosis import (
    Cause,
    Confidence,
    Diagnosis,
    Hypothesis,
    Sharded,
    Strength,
)
from services.shared.memory.forensics.evidence import Evidence, gather_evidence
from services.shared.memory.forensics.free_text import FailurePhase
from services.shared.memory.forensics.remedies import propose_remedies
from services.shared.memory.forensics.request_matching import (
    Candidate,
    Match,
    Role,
    Rounding,
    is_segment_size,
)
from services.shared.memory.forensics.rules import hypotheses_from_rules
from services.shared.memory.forensics.rules_from_signals import ROOT_GATHERED
from services.shared.memory.forensics.scenarios import hypotheses_from_timelines, plan_with
from services.shared.memory.forensics.sharding_verdict import judge_sharding
from services.shared.memory.forensics.state_size import Needs, PlannedPeaks, compute_needs
from services.shared.memory.oom_log.log_scanner import LogReading
from services.shared.memory.oom_log.message_formats import Backend, MessageKind
from services.shared.memory.oom_log.message_parser import PrintedSize
from services.shared.memory.planning.allocation_tape import rounded
from services.shared.memory.planning.plan import Verdict
from services.shared.memory.recipe import OptimizerImpl
from services.shared.memory.sizes import MIB, format_size


def next_measurement(
    evidence: Evidence, needs: Needs | None, hypotheses: tuple[Hypothesis, ...]
) -> str:
    """Return what to measure next, and what each outcome would mean."""
    left = [h for h in hypotheses if h.strength is Strength.POSSIBLE]
    computed = [h for h in left if h.step is not None]
    if len(computed) > 1:
        return _by_step(computed)
    message = evidence.message
    if message is None or message.allocated is None or message.requested is None:
        return (
            "the whole message of the first rank that failed: bytes requested, allocated and "
            "reserved, with its traceback" + _after_wrapping(evidence, needs, joint="; then ")
        )
    if evidence.shape is None:
        return "the model's config.json: with it the request can be matched to a tensor"
    after = _after_wrapping(evidence, needs, joint="")
    return after or "the tokens of a rank's micro-batch and the step it failed in (progress bar)"


def _by_step(left: list[Hypothesis]) -> str:
    """Ask for step and direction: they tell the survivors apart, and every log has them."""
    ordered = sorted(left, key=lambda h: (h.step or 0, h.where))
    outcomes = [f"{h.where.partition(',')[0]} means {h.what}" for h in ordered]
    return (
        "the step it failed in, and whether forward or backward (progress bar and traceback of the "
        f"failing rank): {'; '.join(outcomes)}"
    )


def _after_wrapping(evidence: Evidence, needs: Needs | None, *, joint: str) -> str:
    ranks = evidence.ranks
    if needs is None or not ranks or ranks == 1:
        return ""
    count = needs.num_parameters
    halves, floats, whole = (2 * count // ranks, 4 * count // ranks, 2 * count)
    return (
        f"{joint}memory_allocated() on every rank right after wrapping: {format_size(floats)} is "
        f"sharded float32, {format_size(halves)} sharded bfloat16, {format_size(whole)} the whole "
        "model"
    )


_MOST_NAMES = 3
# What the timeline calls the buffers of parameters; all else it asks for are activations.
_BUFFERS = ("gathered", "flat", "whole", "reduce", "loaded", "shards", "part of", "exp_avg")
_STATE = ("exp_avg", "optimizer", "square root")


def planned_candidates(evidence: Evidence) -> tuple[Candidate, ...]:
    """Return what the planned job asks for in exactly the printed size, by name.

    Empty where micro-batch or sequence length were not told, or the size says nothing.
    """
    case, message = evidence.case, evidence.message
    if message is None or message.requested is None:
        return ()
    if not (case.micro_batch and case.sequence_length and evidence.framework):
        return ()
    rounding = Rounding(
        Backend.CUDA if message.backend is Backend.UNKNOWN else message.backend,
        evidence.log.power2_divisions,
    )
    planned = plan_with(evidence)
    if planned is None or is_segment_size(message.requested, rounding):
        return ()
    names: dict[tuple[Role, int], dict[str, None]] = {}
    for point in planned.timeline:
        for moment in point.rising:
            if moment.request_bytes and _would_print(
                moment.request_bytes, message.requested, rounding
            ):
                role = Role.PARAMETERS if moment.what.startswith(_BUFFERS) else Role.ACTIVATION
                named = names.setdefault((role, moment.request_bytes), {})
                named[f"{moment.what} ({point.phase})"] = None
    match = Match.EXACT if message.requested.tolerance_bytes < MIB else Match.WITHIN_ROUNDING
    dtype = str(planned.recipe.compute)
    return tuple(
        Candidate(role, _joined(list(found)), size, _dtype(found, dtype, evidence), match)
        for (role, size), found in names.items()
    )


def _would_print(request_bytes: int, requested: PrintedSize, rounding: Rounding) -> bool:
    if rounding.backend is Backend.HOST:
        # The timeline counts in blocks of the device's allocator; the host asks for exact bytes.
        return rounded(requested.size_bytes) == request_bytes
    return requested.covers(rounding.driver_request(request_bytes))


def _joined(names: list[str]) -> str:
    shown = " or ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} or {len(names) - _MOST_NAMES} others"


def _dtype(names: dict[str, None], compute: str, evidence: Evidence) -> str:
    stored = evidence.case.parameters or evidence.precision.parameters
    if all(name.startswith(_STATE) for name in names) and stored:
        return str(stored)
    return compute


# What a timeline answers better than a count of bytes per parameter, or a size alone, does.
_COUNTED = frozenset({Cause.CAPACITY, Cause.FRAGMENTATION})
# State of this share leaves no room for one gathered layer and its gradient, whatever the model.
_FULL_SHARE = 0.85


def diagnose(case: Case, *, log: LogReading | None = None) -> Diagnosis:
    """Return what the failure was: cause, confidence, sharding, request, and what to change.

    `certain` is given only where arithmetic excludes every other explanation; where several remain
    the cause is `undecided` and the one measurement that decides is named. A `log` that was
    streamed from a file stands in for the case's own text. Raises InvalidInput for a `model` that
    cannot exist, naming its field.
    """
    evidence = _with_planned_requests(gather_evidence(case, log))
    needs = compute_needs(evidence)
    hypotheses = _rank_hypotheses(evidence, needs)
    cause, confidence = _verdict(hypotheses)
    sharded, shown = _sharding(evidence, cause)
    undecided = confidence is Confidence.UNDECIDED
    diagnosis = Diagnosis(
        cause=cause,
        confidence=confidence,
        sharded=sharded,
        sharded_evidence=shown,
        message=evidence.message,
        accounts=evidence.accounts,
        request=evidence.candidates,
        hypotheses=hypotheses,
        next_measurement=next_measurement(evidence, needs, hypotheses) if undecided else None,
        remedies=propose_remedies(evidence, needs, cause, hypotheses),
        notes=_notes(evidence, needs),
        needs=needs,
        planned=_planned_peaks(evidence),
    )
    return replace(diagnosis, summary=_summary(diagnosis))


def _with_planned_requests(evidence: Evidence) -> Evidence:
    named = planned_candidates(evidence)
    return replace(evidence, candidates=(*evidence.candidates, *named)) if named else evidence


def _rank_hypotheses(evidence: Evidence, needs: Needs | None) -> tuple[Hypothesis, ...]:
    """Return all explanations, the strongest first; equals stay in the order of their authority."""
    stated = tuple(
        _optimizer_or_capacity(evidence, needs, h) for h in hypotheses_from_rules(evidence, needs)
    )
    computed = hypotheses_from_timelines(evidence)
    if computed:
        stated = tuple(h for h in stated if h.cause not in _COUNTED and h.what != ROOT_GATHERED)
        surviving = {h.cause for h in computed if h.strength is not Strength.EXCLUDED}
        if len(surviving) == 1:
            computed = tuple(_promoted_to_likely(h) for h in computed)
    return tuple(sorted((*stated, *computed), key=lambda h: -h.strength))


def _promoted_to_likely(hypothesis: Hypothesis) -> Hypothesis:
    """Believe a survivor without a rival cause, unless it needs something that nobody told."""
    if hypothesis.strength is not Strength.POSSIBLE or hypothesis.objections:
        return hypothesis
    return replace(hypothesis, strength=Strength.LIKELY)


def _optimizer_or_capacity(
    evidence: Evidence, needs: Needs | None, hypothesis: Hypothesis
) -> Hypothesis:
    """Blame the update's temporaries only where the job fits without them."""
    if hypothesis.cause is not Cause.OPTIMIZER_TEMPORARIES:
        return hypothesis
    text = _lacks_room_without(evidence, needs)
    if text is None:
        return hypothesis
    return replace(
        hypothesis,
        cause=Cause.CAPACITY,
        what="the job needs more than the card has, with the update's temporaries on top",
        reasons=(*hypothesis.reasons, text),
    )


def _lacks_room_without(evidence: Evidence, needs: Needs | None) -> str | None:
    """Say how the job crowds the card even without temporaries, or None where it does not."""
    without = plan_with(evidence, optimizer_impl=OptimizerImpl.FUSED)
    if without is not None:
        if without.verdict is Verdict.FITS:
            return None
        return (
            f"without them the job still peaks at {format_size(without.peak_bytes)} of "
            f"{format_size(without.budget_bytes)}: {without.verdict}"
        )
    card = evidence.accounts.usable_bytes or evidence.card_bytes
    held = needs.rank_state_bytes if needs else None
    if not card or not held or held < _FULL_SHARE * card:
        return None
    return f"without them its state alone takes {format_size(held)} of {format_size(card)}"


def _verdict(hypotheses: tuple[Hypothesis, ...]) -> tuple[Cause, Confidence]:
    if not hypotheses or hypotheses[0].strength < Strength.LIKELY:
        return Cause.UNDECIDED, Confidence.UNDECIDED
    best = hypotheses[0]
    if best.strength is Strength.CERTAIN:
        rivals = {h.cause for h in hypotheses if h.strength is Strength.CERTAIN} - {best.cause}
        return best.cause, Confidence.LIKELY if rivals else Confidence.CERTAIN
    return best.cause, Confidence.LIKELY


def _sharding(evidence: Evidence, cause: Cause) -> tuple[Sharded, tuple[str, ...]]:
    sharded, shown = judge_sharding(evidence)
    loading = evidence.phase is FailurePhase.LOAD and not evidence.offloads
    if cause is Cause.HOST_MEMORY and loading and sharded is Sharded.NO:
        return Sharded.UNKNOWN, shown
    return sharded, shown


def _notes(evidence: Evidence, needs: Needs | None) -> tuple[str, ...]:
    """Return what a reader must know to judge the diagnosis."""
    notes = [
        f"field {name!r} is not part of a case and was ignored" for name in evidence.case.ignored
    ]
    notes += [f"the log says that {note}" for note in sorted(evidence.log.notes)]
    message = evidence.message
    if message is not None and message.requested is not None:
        if is_segment_size(message.requested, Rounding(message.backend)):
            notes.append(
                "the printed request is the size of a segment: every small tensor asks for it"
            )
        elif evidence.shape and all(c.match is Match.LOOSE for c in evidence.candidates):
            notes.append("no parameter tensor of this model has the size of the request")
    if message is not None and message.kind is MessageKind.CORRUPT_SIZE:
        notes.append("a size beyond an exbibyte is a corrupt one: look for the error before it")
    if message is not None and message.kind is MessageKind.MASKED:
        notes.append("the assertion hides an ordinary out-of-memory error and its numbers")
    notes += _coincidence(evidence, needs)
    if len(evidence.shapes) > 1:
        notes.append(
            "the name may stand for the backbone or for the language model: both were tried"
        )
    if evidence.shape is None and evidence.case.model_name:
        notes.append(
            f"the shape of {evidence.case.model_name!r} is not known: no tensor was matched"
        )
    if evidence.shape is not None and evidence.shape.language_head and evidence.case.ranks:
        notes.append("predicted peaks leave out the logits of a language-model head")
    if evidence.case.sequence_length is None and evidence.shape is not None:
        notes.append("tokens per rank were not told: predicted peaks take 1 x 2048")
    return tuple(notes)


def _coincidence(evidence: Evidence, needs: Needs | None) -> list[str]:
    """Warn where a rank's share of the state has the size of the whole model."""
    allocated = evidence.accounts.allocated_bytes
    if needs is None or needs.rank_state_bytes is None or allocated is None:
        return []
    state, whole, ranks = needs.rank_state_bytes, needs.whole_weights_bytes, evidence.ranks or 1
    if ranks == 1 or abs(state - whole) > 0.02 * whole or abs(allocated - whole) > 0.05 * whole:
        return []
    return [
        f"{needs.bytes_per_parameter} bytes a parameter over {ranks} ranks is {format_size(state)}, "
        f"and so is the whole model in 2 bytes: that {format_size(allocated)} were allocated cannot "
        "tell a sharded job from an unsharded one"
    ]


def _planned_peaks(evidence: Evidence) -> PlannedPeaks | None:
    planned = plan_with(evidence)
    if planned is None:
        return None
    assumed = evidence.optimizer_impl is None
    fused = plan_with(evidence, optimizer_impl=OptimizerImpl.FUSED) if assumed else None
    return PlannedPeaks(
        peak_bytes=planned.peak_bytes,
        peak_phase=planned.peak_phase,
        optimizer_impl=planned.recipe.optimizer_impl,
        budget_bytes=planned.budget_bytes,
        verdict=planned.verdict,
        assumes_optimizer_impl=assumed,
        fused_peak_bytes=fused.peak_bytes if fused else None,
    )


def _summary(diagnosis: Diagnosis) -> str:
    """Return one sentence for people."""
    best = diagnosis.hypotheses[0] if diagnosis.hypotheses else None
    if best is None:
        return "Nothing given says why the memory ran out."
    if diagnosis.confidence is not Confidence.UNDECIDED:
        return f"{best.what[0].upper()}{best.what[1:]}."
    left = [h.what for h in diagnosis.hypotheses if h.strength is Strength.POSSIBLE]
    if not left:
        return "Every explanation that could be computed is excluded by the numbers."
    return f"{len(left)} explanation{'s' * (len(left) > 1)} left: {'; '.join(left)}."
