"""The explanations of a failure that its evidence speaks for, in the order of their authority.

Each rule looks at one kind of evidence and answers with a hypothesis or with nothing. What can be
computed from a timeline of the job is in `scenarios`; `forensics` weighs all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from services.shared.memory.forensics import rules_from_byte_counts, rules_from_signals
from services.shared.memory.forensics.diagnosis import Hypothesis
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.state_size import Needs

Rule = Callable[[Evidence, Needs | None], Hypothesis | None]


def from_evidence(evidence: Evidence, needs: Needs | None) -> tuple[Hypothesis, ...]:
    """Return the explanations that the evidence speaks for, the most authoritative first."""
    answers = (rule(evidence, needs) for rule in _RULES)
    return tuple(answer for answer in answers if answer is not None)


def _symptom(rule: Callable[[Evidence], Hypothesis | None]) -> Rule:
    return lambda evidence, _needs: rule(evidence)


# What was measured, then who spoke, then what was warned of, then where it stood, then what was
# asked for, then what is merely consistent with the numbers.
_RULES: tuple[Rule, ...] = (
    rules_from_byte_counts.probe_unsharded,
    _symptom(rules_from_signals.probe_coarse),
    rules_from_byte_counts.host,
    _symptom(rules_from_signals.driver),
    _symptom(rules_from_signals.outside),
    _symptom(rules_from_signals.card_taken),
    rules_from_byte_counts.host_loading,
    rules_from_byte_counts.loading_whole,
    _symptom(rules_from_signals.upcast),
    _symptom(rules_from_signals.coarse_warning),
    rules_from_byte_counts.saving,
    rules_from_byte_counts.loading_unknown,
    rules_from_byte_counts.training_unsharded,
    _symptom(rules_from_signals.activations),
    _symptom(rules_from_signals.evaluation),
    _symptom(rules_from_signals.optimizer),
    _symptom(rules_from_signals.coarse_request),
    _symptom(rules_from_signals.coarse_policy),
    _symptom(rules_from_signals.card_shared),
    rules_from_byte_counts.capacity,
    _symptom(rules_from_signals.fragmentation),
)
