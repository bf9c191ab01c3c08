"""What an evaluation states of its models' figures: intervals, paired differences, warnings.

Legend: N texts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict

from typing_extensions import NotRequired

from services.shared.datasets.card import Head
from services.shared.jobs.documents import Evaluation
from services.shared.jobs.evaluation_text import compare_with_baseline
from services.shared.model.baseline import Baseline
from services.shared.model.bootstrap import (
    Interval,
    mcnemar,
    percentile_interval,
    proportion_interval,
    resample,
)
from services.shared.model.metrics import Array, head_metrics, labelled_mask

DEFAULT_CONFIDENCE = 0.95


class BaselineReport(TypedDict):
    """The metrics of the baseline of one head, on the texts that the model was evaluated on."""

    accuracy: float
    macro_f1: float
    accuracy_interval: Interval
    macro_f1_interval: Interval
    training_texts: int


class PairedReport(TypedDict):
    """A model against another on the same texts; differences are the model's figure minus the other's."""

    accuracy_difference: float
    accuracy_difference_interval: Interval
    macro_f1_difference: float
    macro_f1_difference_interval: Interval
    macro_f1_share_interval: NotRequired[Interval]  # model / other; absent where the other has 0
    only_model_correct: int  # texts that the other gets wrong
    only_other_correct: int
    mcnemar_p: float


@dataclass(frozen=True)
class HeldOut:
    """Predictions of all models for the same held-out texts, by head; see `metrics.predict`."""

    heads: Sequence[Head]
    labels: Mapping[str, Array]  # with -100, or NaN rows, where missing
    model: Mapping[str, Array]
    teacher: Mapping[str, Array] = field(default_factory=dict)  # of a student
    baselines: Mapping[str, Baseline] = field(default_factory=dict)


def add_comparisons(
    evaluation: Evaluation, held_out: HeldOut, *, seed: int, confidence: float = DEFAULT_CONFIDENCE
) -> None:
    """Add baselines, intervals, paired comparisons and warnings to an evaluation of these predictions."""
    evaluation["confidence"] = confidence
    for head in held_out.heads:
        if labelled_mask(head, held_out.labels[head.name]).any():
            comparison = _HeadComparison(head, held_out, seed=seed, confidence=confidence)
            comparison.add_to(evaluation)
    kind = "student" if held_out.teacher else "model"
    verdicts = compare_with_baseline(evaluation["heads"], confidence=confidence, model=kind)
    evaluation["warnings"] = [v.sentence for v in verdicts if not v.is_better]


class _HeadComparison:
    """The resampled metrics of all models on one head."""

    def __init__(self, head: Head, held_out: HeldOut, *, seed: int, confidence: float) -> None:
        self.head = head
        self.seed, self.confidence = seed, confidence
        self.baseline = held_out.baselines.get(head.name)
        found = {"model": held_out.model[head.name]}
        if head.name in held_out.teacher:
            found["teacher"] = held_out.teacher[head.name]
        if self.baseline is not None:
            found["baseline"] = self.baseline.predicted
        self.predictions = found
        keep = labelled_mask(head, held_out.labels[head.name])
        self.labels = held_out.labels[head.name][keep]
        self.resampled = resample(
            head,
            predictions={name: values[keep] for name, values in found.items()},
            labels=self.labels,
            seed=seed,
        )
        self.measured = {
            name: head_metrics(head, predicted=values[keep], labels=self.labels)
            for name, values in found.items()
        }

    def add_to(self, evaluation: Evaluation) -> None:
        """Add what is known of this head to the evaluation of the model, and to its teacher's."""
        name = self.head.name
        ours = evaluation["heads"][name]
        ours |= self._intervals("model")
        if "teacher" in self.predictions:
            theirs = evaluation["teacher"]["heads"][name]
            theirs |= self._intervals("teacher")
            ours["agreement_interval"] = self._agreement_interval(ours["agreement"])
            ours["against_teacher"] = self._paired("model", "teacher")
        if self.baseline is not None:
            ours["baseline"] = self._baseline(self.baseline)
            ours["against_baseline"] = self._paired("model", "baseline")
            if "teacher" in self.predictions:
                theirs["against_baseline"] = self._paired("teacher", "baseline")

    def _baseline(self, baseline: Baseline) -> BaselineReport:
        measured, intervals = self.measured["baseline"], self._intervals("baseline")
        return {
            "accuracy": measured.accuracy,
            "macro_f1": measured.macro_f1,
            "accuracy_interval": intervals["accuracy_interval"],
            "macro_f1_interval": intervals["macro_f1_interval"],
            "training_texts": baseline.training_texts,
        }

    def _intervals(self, model: str) -> dict[str, Interval]:
        found = self.resampled[model]
        return {
            "accuracy_interval": self._interval(found.accuracy),
            "macro_f1_interval": self._interval(found.macro_f1),
        }

    def _agreement_interval(self, agreement: float) -> Interval:
        size = len(self.predictions["model"])
        return proportion_interval(agreement, size=size, seed=self.seed, confidence=self.confidence)

    def _paired(self, model: str, other: str) -> PairedReport:
        one, two = self.resampled[model], self.resampled[other]
        ours, theirs = self.measured[model], self.measured[other]
        report: PairedReport = {
            "accuracy_difference": ours.accuracy - theirs.accuracy,
            "accuracy_difference_interval": self._interval(one.accuracy - two.accuracy),
            "macro_f1_difference": ours.macro_f1 - theirs.macro_f1,
            "macro_f1_difference_interval": self._interval(one.macro_f1 - two.macro_f1),
            "only_model_correct": int((one.correct & ~two.correct).sum()),
            "only_other_correct": int((two.correct & ~one.correct).sum()),
            "mcnemar_p": mcnemar(one.correct, two.correct),
        }
        if (two.macro_f1 > 0).all():
            report["macro_f1_share_interval"] = self._interval(one.macro_f1 / two.macro_f1)
        return report

    def _interval(self, values: Array) -> Interval:
        return percentile_interval(values, confidence=self.confidence)
