"""The explanations of a failure that its evidence speaks for, in the order of their authority.

Each rule looks at one kind of evidence and answers with a hypothesis or with nothing. What can be
computed from a timeline of the job is in `scenarios`; `forensics` weighs all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from services.shared.memory import arithmetic, symptoms
from services.shared.memory.diagnosis import Hypothesis
from services.shared.memory.evidence import Evidence
from services.shared.memory.needs import Needs

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
    arithmetic.probe_unsharded,
    _symptom(symptoms.probe_coarse),
    arithmetic.host,
    _symptom(symptoms.driver),
    _symptom(symptoms.outside),
    _symptom(symptoms.card_taken),
    arithmetic.host_loading,
    arithmetic.loading_whole,
    _symptom(symptoms.upcast),
    _symptom(symptoms.coarse_warning),
    arithmetic.saving,
    arithmetic.loading_unknown,
    arithmetic.training_unsharded,
    _symptom(symptoms.activations),
    _symptom(symptoms.evaluation),
    _symptom(symptoms.optimizer),
    _symptom(symptoms.coarse_request),
    _symptom(symptoms.coarse_policy),
    _symptom(symptoms.card_shared),
    arithmetic.capacity,
    _symptom(symptoms.fragmentation),
)
