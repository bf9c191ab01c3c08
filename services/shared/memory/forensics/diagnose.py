"""Diagnose a failure: gather the evidence, test every explanation, propose remedies."""

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
from services.shared.memory.forensics.matching.candidates import Match
from services.shared.memory.forensics.matching.planned_requests import planned_candidates
from services.shared.memory.forensics.matching.rounding import Rounding, is_segment_size
from services.shared.memory.forensics.next_measurement import next_measurement
from services.shared.memory.forensics.remedies.propose import propose_remedies
from services.shared.memory.forensics.rules.progress import state_was_smaller, weighed_by_progress
from services.shared.memory.forensics.rules.remainder import (
    BATCH_ACTIVATIONS,
    explanations_left_open,
)
from services.shared.memory.forensics.rules.rule_table import hypotheses_from_rules
from services.shared.memory.forensics.rules.signals import ROOT_GATHERED
from services.shared.memory.forensics.scenarios import hypotheses_from_timelines, plan_with
from services.shared.memory.forensics.sharding_verdict import judge_sharding
from services.shared.memory.forensics.state_size import Needs, PlannedPeaks, compute_needs
from services.shared.memory.forensics.stated_failure import (
    failure_is_stated,
    missing_summary,
    what_would_not_fit,
)
from services.shared.memory.oom_log.log_scanner import LogReading
from services.shared.memory.oom_log.message_formats import MessageKind
from services.shared.memory.planning.plan_contract import Verdict
from services.shared.memory.recipe import OptimizerImpl
from services.shared.memory.sizes import format_size

# Causes that a timeline decides better than bytes per parameter or one size can.
_COUNTED = frozenset({Cause.CAPACITY, Cause.FRAGMENTATION})
_DECIDED_BY_TIMELINES = frozenset({ROOT_GATHERED, BATCH_ACTIVATIONS})
# Training state above this share of the device leaves no room for one gathered layer and its
# gradient, whatever the model.
_FULL_SHARE = 0.85


def diagnose(case: Case, *, log: LogReading | None = None) -> Diagnosis:
    """Return the diagnosis of a failed job: cause, confidence, sharding, request, remedies.

    `certain` is given only where arithmetic excludes every other explanation; where several remain
    the cause is `undecided` and the one measurement that decides is named. A `log` that was
    streamed from a file replaces the case's own text. Raises InvalidInput for a `model` that
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
    if not failure_is_stated(evidence):
        return replace(diagnosis, summary=missing_summary(evidence))
    return replace(diagnosis, summary=_summary(diagnosis))


def _with_planned_requests(evidence: Evidence) -> Evidence:
    named = planned_candidates(evidence)
    return replace(evidence, candidates=(*evidence.candidates, *named)) if named else evidence


def _rank_hypotheses(evidence: Evidence, needs: Needs | None) -> tuple[Hypothesis, ...]:
    """Return all hypotheses, the strongest first; equals stay in the order of the rules."""
    if not failure_is_stated(evidence):
        if evidence.message is not None:
            return ()  # the scheduler ended the job
        return what_would_not_fit(evidence, needs, hypotheses_from_rules(evidence, needs))
    stated = tuple(
        weighed_by_progress(evidence, needs, _optimizer_or_capacity(evidence, needs, h))
        for h in hypotheses_from_rules(evidence, needs)
    )
    computed = hypotheses_from_timelines(evidence)
    if computed:
        stated = tuple(
            h for h in stated if h.cause not in _COUNTED and h.what not in _DECIDED_BY_TIMELINES
        )
        surviving = {h.cause for h in computed if h.strength is not Strength.EXCLUDED}
        if len(surviving) == 1:
            computed = tuple(_promoted_to_likely(h) for h in computed)
    ordered = sorted((*stated, *computed), key=lambda h: -h.strength)
    left = explanations_left_open(evidence, needs, tuple(ordered)) if not computed else ()
    if needs is not None:
        left, ordered = _with_sole_survivor_likely(left, ordered)
    return _with_one_likely(
        [*(h for h in ordered if h.strength), *left, *(h for h in ordered if not h.strength)]
    )


def _with_sole_survivor_likely(
    left: tuple[Hypothesis, ...], ordered: list[Hypothesis]
) -> tuple[tuple[Hypothesis, ...], list[Hypothesis]]:
    """Return the hypotheses with the only cause that the sizes leave as likely."""
    open_causes = {h.cause for h in (*left, *ordered) if h.strength is not Strength.EXCLUDED}
    if len(open_causes) != 1:
        return left, ordered
    return tuple(map(_promoted_to_likely, left)), [_promoted_to_likely(h) for h in ordered]


def _with_one_likely(ordered: list[Hypothesis]) -> tuple[Hypothesis, ...]:
    """Return the hypotheses with at most one likely; others stay possible."""
    if not ordered:
        return ()
    if ordered[0].cause is Cause.OWN_RANKS_ON_CARD:
        ordered = [h for h in ordered if h.cause is not Cause.OTHER_PROCESS]
    best = ordered[0]
    ordered = [
        replace(h, strength=Strength.POSSIBLE)
        if h.strength is Strength.LIKELY and h is not best
        else h
        for h in ordered
    ]
    return tuple(sorted(ordered, key=lambda h: -h.strength))


def _promoted_to_likely(hypothesis: Hypothesis) -> Hypothesis:
    """Return a hypothesis without a rival cause as likely, unless there are objections to it."""
    if hypothesis.strength is not Strength.POSSIBLE or hypothesis.objections:
        return hypothesis
    return replace(hypothesis, strength=Strength.LIKELY)


def _optimizer_or_capacity(
    evidence: Evidence, needs: Needs | None, hypothesis: Hypothesis
) -> Hypothesis:
    """Attribute the failure to the update's temporaries only where the job fits without them."""
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
    """Return why the job does not fit even without temporaries, or None where it does."""
    if state_was_smaller(evidence, needs):
        return None
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
    """Return the caveats that a reader needs to judge the diagnosis."""
    notes = [
        f"field {name!r} is not part of a case and was ignored" for name in evidence.case.ignored
    ]
    if evidence.from_log:
        stated = ", ".join(f"{name} {value}" for name, value in evidence.from_log.items())
        notes.append(f"read from the log: {stated}")
    notes += [f"the log says that {note}" for note in sorted(evidence.log.notes)]
    message = evidence.message
    if message is not None and message.requested is not None:
        if is_segment_size(message.requested, Rounding(message.backend)):
            notes.append(
                "the printed request is the size of a segment: every small tensor requests it"
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
        notes.append("tokens per rank are not given: predicted peaks assume 1 x 2048")
    return tuple(notes)


def _coincidence(evidence: Evidence, needs: Needs | None) -> list[str]:
    """Return a warning where a rank's share of the state has the size of the whole model."""
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
    """Return the diagnosis in one sentence."""
    best = diagnosis.hypotheses[0] if diagnosis.hypotheses else None
    if best is None:
        return "Nothing given says why the memory ran out."
    if diagnosis.confidence is not Confidence.UNDECIDED:
        return f"{best.what[0].upper()}{best.what[1:]}."
    left = [h.what for h in diagnosis.hypotheses if h.strength is Strength.POSSIBLE]
    if not left:
        return "Every explanation that could be computed is excluded by the numbers."
    return f"{len(left)} explanation{'s' * (len(left) > 1)} left: {'; '.join(left)}."
