"""Evaluation of a student against its teacher on held-out texts.

Legend: N texts, C classes of a head. Logits are [N, C] by head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TypedDict

import torch
from transformers import PreTrainedTokenizerBase

from services.shared.datasets.card import Head
from services.shared.datasets.text import Text
from services.shared.model.calibration import Calibration, calibration_error
from services.shared.model.metrics import Array, HeadReport, head_metrics, predict
from services.shared.model.tokens import encode, pad

LATENCY_TEXTS = 20
_WARM_UP = 3


class HeadEvaluation(HeadReport, total=False):
    """The metrics of one head with its calibration, in the order of the JSON report."""

    ece: float
    temperature: float
    ece_calibrated: float
    thresholds: dict[str, float]  # by label
    agreement: float  # of a student with its teacher


class TeacherEvaluation(TypedDict):
    """The teacher's side of a comparison; the report adds its size, latency and placement."""

    heads: dict[str, HeadEvaluation]


class Comparison(TypedDict):
    """The evaluation of a student against its teacher."""

    heads: dict[str, HeadEvaluation]
    macro_f1: float
    teacher: TeacherEvaluation
    student_over_teacher: dict[
        str, float | None
    ]  # share of the teacher's macro-F1; None if that is 0


def compare(
    heads: Sequence[Head],
    *,
    student: Mapping[str, Array],
    teacher: Mapping[str, Array],
    labels: Mapping[str, Array],
    calibration: Mapping[str, Calibration],
    teacher_calibration: Mapping[str, Calibration],
) -> Comparison:
    """Return the evaluation that the gate reads; each model predicts with its own thresholds."""
    ours: dict[str, HeadEvaluation] = {}
    theirs: dict[str, HeadEvaluation] = {}
    for head in heads:
        own, other = calibration.get(head.name), teacher_calibration.get(head.name)
        predicted = _predict(head, student[head.name], own)
        expected = _predict(head, teacher[head.name], other)
        truth = labels[head.name]
        theirs[head.name] = _head_report(head, teacher[head.name], expected, truth, other)
        ours[head.name] = _head_report(head, student[head.name], predicted, truth, own)
        ours[head.name]["agreement"] = agreement(predicted, expected)
    return {
        "heads": ours,
        "macro_f1": sum(entry["macro_f1"] for entry in ours.values()) / len(ours),
        "teacher": {"heads": theirs},
        "student_over_teacher": {
            name: _ratio(entry["macro_f1"], theirs[name]["macro_f1"])
            for name, entry in ours.items()
        },
    }


def agreement(student: Array, teacher: Array) -> float:
    """Return the share of texts, labelled or not, with equal predictions: [N] or [N, C]."""
    same = student == teacher
    return float(same.reshape(len(same), -1).all(axis=1).mean()) if len(same) else 0.0


@torch.no_grad()
def single_text_seconds(
    classify: Callable[..., Mapping[str, torch.Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    *,
    max_length: int,
    prefix: str,
    device: torch.device,
) -> float | None:
    """Return the median latency from one text to its logits; None without texts."""
    seconds = []
    chosen = list(texts[:LATENCY_TEXTS])
    for text in chosen[:1] * _WARM_UP + chosen:
        started = time.perf_counter()
        tokens, _ = encode([text], tokenizer, max_length=max_length, prefix=prefix)
        logits = classify(*pad(tokens, tokenizer.pad_token_id).to(device))
        for values in logits.values():
            values.cpu()  # synchronises with the device
        seconds.append(time.perf_counter() - started)
    return median(seconds[_WARM_UP:]) if chosen else None


def _predict(head: Head, logits: Array, calibration: Calibration | None) -> Array:
    return predict(
        head, logits, None if calibration is None else calibration.logit_thresholds(head)
    )


def _head_report(
    head: Head, logits: Array, predicted: Array, labels: Array, calibration: Calibration | None
) -> HeadEvaluation:
    metrics = head_metrics(head, predicted=predicted, labels=labels).report()
    report: HeadEvaluation = {
        **metrics,  # type: ignore[typeddict-item]  # HeadReport has none of the optional keys
        "ece": calibration_error(head, logits, labels, temperature=1.0),
    }
    if calibration is None:
        return report
    report["temperature"] = calibration.temperature
    report["ece_calibrated"] = calibration_error(
        head, logits, labels, temperature=calibration.temperature
    )
    if calibration.thresholds:
        report["thresholds"] = calibration.thresholds
    return report


def _ratio(student: float, teacher: float) -> float | None:
    return student / teacher if teacher > 0 else None
