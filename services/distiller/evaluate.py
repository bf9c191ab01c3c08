"""The student judged on held-out texts, beside its teacher.

Legend: N texts, C classes of a head. Logits are [N, C] by head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from services.shared.datasets.card import Head
from services.shared.model.calibration import Calibration, calibration_error
from services.shared.model.metrics import Array, head_metrics, predict
from services.shared.model.tokens import encode, pad

LATENCY_TEXTS = 20
_WARM_UP = 3


def compare(
    heads: Sequence[Head],
    *,
    student: Mapping[str, Array],
    teacher: Mapping[str, Array],
    labels: Mapping[str, Array],
    calibration: Mapping[str, Calibration],
    teacher_calibration: Mapping[str, Calibration],
) -> dict[str, Any]:
    """Return the evaluation that the gate reads; each side answers by its own thresholds.

    {"heads": {name: {accuracy, macro_f1, classes, confusion, agreement, ece, ...}},
     "teacher": {"heads": {name: {accuracy, macro_f1, ...}}},
     "student_over_teacher": {name: share of the teacher's macro-F1, None where that is 0}}
    """
    ours, theirs = {}, {}
    for head in heads:
        own, other = calibration.get(head.name), teacher_calibration.get(head.name)
        answered = _answers(head, student[head.name], own)
        expected = _answers(head, teacher[head.name], other)
        truth = labels[head.name]
        theirs[head.name] = _judge(head, teacher[head.name], expected, truth, other)
        ours[head.name] = _judge(head, student[head.name], answered, truth, own) | {
            "agreement": agreement(answered, expected)
        }
    return {
        "heads": ours,
        "macro_f1": sum(entry["macro_f1"] for entry in ours.values()) / len(ours),
        "teacher": {"heads": theirs},
        "student_over_teacher": {
            name: _share(entry["macro_f1"], theirs[name]["macro_f1"])
            for name, entry in ours.items()
        },
    }


def agreement(student: Array, teacher: Array) -> float:
    """Return the share of texts, labelled or not, that both answer alike: [N] or [N, C]."""
    same = student == teacher
    return float(same.reshape(len(same), -1).all(axis=1).mean()) if len(same) else 0.0


@torch.no_grad()
def single_text_seconds(
    ask: Callable[..., Mapping[str, torch.Tensor]],
    tokenizer: Any,
    texts: Sequence[str],
    *,
    max_length: int,
    device: torch.device,
) -> float | None:
    """Return the median time from one text to its logits; None without texts."""
    seconds = []
    chosen = list(texts[:LATENCY_TEXTS])
    for text in chosen[:1] * _WARM_UP + chosen:
        began = time.perf_counter()
        ids, mask = pad(encode([text], tokenizer, max_length=max_length)[0], tokenizer.pad_token_id)
        logits = ask(ids.to(device), mask)
        for values in logits.values():
            values.cpu()  # waits for the device
        seconds.append(time.perf_counter() - began)
    return median(seconds[_WARM_UP:]) if chosen else None


def _answers(head: Head, logits: Array, calibration: Calibration | None) -> Array:
    return predict(head, logits, None if calibration is None else calibration.cuts(head))


def _judge(
    head: Head, logits: Array, answered: Array, labels: Array, calibration: Calibration | None
) -> dict[str, Any]:
    report = head_metrics(head, predicted=answered, labels=labels).as_dict()
    report["ece"] = calibration_error(head, logits, labels, temperature=1.0)
    if calibration is None:
        return report
    temperature = calibration.temperature
    error = calibration_error(head, logits, labels, temperature=temperature)
    report |= {"temperature": temperature, "ece_calibrated": error}
    return report | ({"thresholds": calibration.thresholds} if calibration.thresholds else {})


def _share(student: float, teacher: float) -> float | None:
    return student / teacher if teacher > 0 else None
