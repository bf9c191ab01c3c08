"""The rules that turn evidence into hypotheses, in order of precedence.

Each rule examines one kind of evidence and returns a hypothesis or None. What can be computed from
a timeline of the job is in `scenarios`; `diagnose` ranks both.
"""

from __future__ import annotations

from collections.abc import Callable

from services.shared.memory.forensics.diagnosis import Cause, Hypothesis
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.rules import (
    byte_counts,
    remainder,
    signals,
    texts,
)
from services.shared.memory.forensics.state_size import Needs

Rule = Callable[[Evidence, Needs | None], Hypothesis | None]


def hypotheses_from_rules(evidence: Evidence, needs: Needs | None) -> tuple[Hypothesis, ...]:
    """Return the hypotheses that the evidence supports, in order of precedence."""
    answers = (rule(evidence, needs) for rule in _RULES)
    distinct: dict[tuple[Cause, str], Hypothesis] = {}
    for answer in answers:
        if answer is not None:
            distinct.setdefault((answer.cause, answer.what), answer)
    return tuple(distinct.values())


def _ignoring_needs(rule: Callable[[Evidence], Hypothesis | None]) -> Rule:
    return lambda evidence, _needs: rule(evidence)


# Measurements first, then the source of the message, warnings, the place in the program, the
# request, and last what is merely consistent with the numbers.
_RULES: tuple[Rule, ...] = (
    byte_counts.probe_found_unsharded,
    _ignoring_needs(signals.probe_found_single_unit),
    _ignoring_needs(texts.named_component),
    byte_counts.host_out_of_memory,
    _ignoring_needs(texts.own_ranks_on_card),
    _ignoring_needs(texts.checkpoint_on_the_first_card),
    _ignoring_needs(texts.mps_watermark),
    _ignoring_needs(texts.single_block_limit),
    _ignoring_needs(texts.larger_than_the_device),
    _ignoring_needs(signals.driver_refusal),
    _ignoring_needs(signals.outside_allocator),
    _ignoring_needs(signals.device_mostly_foreign),
    remainder.weights_beyond_card,
    _ignoring_needs(texts.server_start),
    byte_counts.host_memory_while_loading,
    byte_counts.whole_model_while_loading,
    _ignoring_needs(signals.float32_upcast),
    _ignoring_needs(signals.mixed_unit_warning),
    byte_counts.checkpoint_gather,
    byte_counts.unsharded_load,
    byte_counts.unsharded_training,
    remainder.float32_weights,
    byte_counts.state_beyond_card,
    _ignoring_needs(signals.activations),
    _ignoring_needs(signals.evaluation_outputs),
    _ignoring_needs(signals.optimizer_temporaries),
    _ignoring_needs(signals.coarse_unit_request),
    _ignoring_needs(signals.single_unit_policy),
    _ignoring_needs(signals.device_partly_foreign),
    byte_counts.capacity,
    remainder.activations_beyond_state,
    remainder.longer_batch,
    _ignoring_needs(signals.fragmentation),
)
