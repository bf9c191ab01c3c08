"""The result of `stillhouse demo`: what it prints, and writes with `--json`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, TypedDict

from rich.table import Table
from typing_extensions import NotRequired

from services.cli.responses import (
    IntervalResponse,
    JobResponse,
    ModelResponse,
)
from services.cli.terminal import Console
from services.shared.jobs.evaluation_text import (
    BASELINE,
    BaselineVerdict,
    compare_with_baseline,
    format_level,
)


class HeadScores(TypedDict):
    """The scores of one head on held-out reviews."""

    accuracy: float
    macro_f1: float
    accuracy_interval: NotRequired[IntervalResponse]
    macro_f1_interval: NotRequired[IntervalResponse]


class ModelResult(TypedDict):
    """The quality and the size of one model."""

    heads: dict[str, HeadScores]
    parameters: int
    size_bytes: int


class DemoResult(TypedDict):
    """What the demo measured."""

    base_model: str | None  # None: trained from scratch
    rows: dict[str, int]
    unlabelled_rows: int
    teacher: ModelResult
    student: ModelResult
    baseline: dict[str, HeadScores]  # n-gram counts with logistic regression, by head
    confidence: float  # of the intervals
    verdicts: list[str]  # how teacher and student compare with the baseline
    student_over_teacher: float  # accuracy on sentiment
    predict: Any  # the response of `POST /predict`
    job_seconds: dict[str, float]
    seconds: float


def demo_result(
    models: Mapping[str, ModelResponse],
    *,
    ended: Mapping[str, JobResponse],
    prediction: Any,
    base_model: str | None,
    rows: dict[str, int],
    unlabelled_rows: int,
) -> DemoResult:
    """Return the result of both jobs; the duration of the whole is not known here."""
    teacher, student = _model_result(models["teacher"]), _model_result(models["student"])
    ratio = student["heads"]["sentiment"]["accuracy"] / teacher["heads"]["sentiment"]["accuracy"]
    metrics = models["student"]["metrics"] or {}
    return {
        "base_model": base_model,
        "rows": rows,
        "unlabelled_rows": unlabelled_rows,
        "teacher": teacher,
        "student": student,
        "baseline": {
            head: _scores(found["baseline"])
            for head, found in (metrics.get("heads") or {}).items()
            if found.get("baseline")
        },
        "confidence": metrics.get("confidence", 0.0),
        "verdicts": [
            f"{'' if verdict.is_better else 'WARNING: '}{verdict.sentence}"
            for name in ("teacher", "student")
            for verdict in _verdicts(models[name], name)
        ],
        "student_over_teacher": round(ratio, 4),
        "predict": prediction,
        "job_seconds": {name: _seconds(job) for name, job in ended.items()},
        "seconds": 0.0,
    }


def print_result(result: DemoResult, console: Console) -> None:
    """Print the scores, what they mean, and what the models cost."""
    rows, more = result["rows"], result["unlabelled_rows"]
    title = f"{rows['test']:,} held-out reviews ({format_level(result['confidence'])} intervals)"
    table = Table(title=title)
    for column in ("", "head", "accuracy", "macro-F1"):
        table.add_column(column, no_wrap=True)
    parts = {name: result[name]["heads"] for name in ("teacher", "student")}
    for name, heads in (*parts.items(), (BASELINE, result["baseline"])):
        for head, scores in heads.items():
            table.add_row(
                name,
                head,
                _figure(scores["accuracy"], scores.get("accuracy_interval")),
                _figure(scores["macro_f1"], scores.get("macro_f1_interval")),
            )
    console.print(table)
    unlabelled = f" and {more:,} without labels" if more else ""
    lines = [
        f"{rows['train']:,} labelled reviews for all three{unlabelled} for the student.",
        *(f"{verdict}." for verdict in result["verdicts"]),
        f"student / teacher accuracy on sentiment: {result['student_over_teacher']:.3f}",
        _cost("teacher", result["teacher"], result),
        _cost("student", result["student"], result),
        f"{result['seconds']:.0f} s in all.",
    ]
    for line in lines:
        console.print(line, highlight=False)


def _verdicts(model: ModelResponse, name: str) -> list[BaselineVerdict]:
    metrics = model["metrics"] or {}
    return compare_with_baseline(
        metrics.get("heads"), confidence=metrics.get("confidence"), model=name
    )


def _model_result(model: ModelResponse) -> ModelResult:
    heads = (model["metrics"] or {}).get("heads") or {}
    return {
        "heads": {head: _scores(metrics) for head, metrics in heads.items()},
        "parameters": model["parameters"],
        "size_bytes": model["size_bytes"],
    }


def _scores(metrics: Any) -> HeadScores:
    scores: HeadScores = {"accuracy": metrics["accuracy"], "macro_f1": metrics["macro_f1"]}
    if "macro_f1_interval" in metrics:
        scores["accuracy_interval"] = metrics["accuracy_interval"]
        scores["macro_f1_interval"] = metrics["macro_f1_interval"]
    return scores


def _figure(value: float, interval: IntervalResponse | None) -> str:
    bounds = f" ({interval['low']:.3f} to {interval['high']:.3f})" if interval else ""
    return f"{value:.3f}{bounds}"


def _cost(name: str, model: ModelResult, result: DemoResult) -> str:
    return (
        f"{name}: {model['parameters'] / 1e6:.1f} M parameters, {model['size_bytes'] / 1e6:.1f} MB, "
        f"{result['job_seconds'][name]:.0f} s"
    )


def _seconds(job: JobResponse) -> float:
    return round(_timestamp(job["ended_at"]) - _timestamp(job["started_at"]), 1)


def _timestamp(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
