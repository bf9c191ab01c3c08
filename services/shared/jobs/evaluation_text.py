"""Figures of an evaluation in words: for the gate, the model card and the CLI."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

BASELINE = "n-grams"


@dataclass(frozen=True)
class Figures:
    """The scores of one model on one head, each with its interval where one was computed."""

    model: str
    head: str
    accuracy: str
    macro_f1: str


@dataclass(frozen=True)
class BaselineVerdict:
    """Whether a model is better than its baseline on one head by more than chance, and by how much."""

    is_better: bool
    sentence: str  # without a full stop


def figures(evaluation: Any, *, model: str) -> list[Figures]:
    """Return the scores of the evaluated model, of its teacher and of the baselines, in this order."""
    ours = (evaluation or {}).get("heads") or {}
    theirs = ((evaluation or {}).get("teacher") or {}).get("heads") or {}
    baselines = {name: metrics.get("baseline") for name, metrics in ours.items()}
    return [
        Figures(name, head, _score(metrics, "accuracy"), _score(metrics, "macro_f1"))
        for name, heads in ((model, ours), ("teacher", theirs), (BASELINE, baselines))
        for head, metrics in heads.items()
        if metrics
    ]


def format_level(confidence: float) -> str:
    """Return a confidence level as a percentage: 95%."""
    return f"{100 * confidence:g}%"


def compare_with_baseline(
    heads: Any, *, confidence: float | None, model: str
) -> list[BaselineVerdict]:
    """Return how a model compares on each head that has a baseline.

    `heads` and `confidence` are those of its evaluation.
    """
    return [
        BaselineVerdict(
            is_better=(difference if interval is None else interval["low"]) > 0,
            sentence=f"{head}: the {model} is {_relation(difference, interval, confidence)}",
        )
        for head, difference, interval in _differences(heads)
    ]


def _differences(heads: Any) -> Iterator[tuple[str, float, Mapping[str, float] | None]]:
    """Yield head, difference of macro-F1 and its interval, which older evaluations lack."""
    for name, metrics in sorted((heads or {}).items()):
        found = metrics if isinstance(metrics, dict) else {}
        paired = found.get("against_baseline")
        if paired:
            yield name, paired["macro_f1_difference"], paired["macro_f1_difference_interval"]
        elif found.get("baseline") and found.get("macro_f1") is not None:
            yield name, found["macro_f1"] - found["baseline"]["macro_f1"], None


def _relation(
    difference: float, interval: Mapping[str, float] | None, confidence: float | None
) -> str:
    if interval is None or confidence is None:
        relation = "better" if difference > 0 else "not better"
        return f"{relation} than character n-gram counts ({difference:+.4f} macro-F1)"
    level = format_level(confidence)
    bounds = f"{level} interval {interval['low']:+.4f} to {interval['high']:+.4f}"
    if interval["low"] <= 0 <= interval["high"]:
        return (
            "not better than character n-gram counts by more than chance "
            f"({difference:+.4f} macro-F1, {bounds})"
        )
    relation = "better" if difference > 0 else "worse"
    return f"{relation} than character n-gram counts by {abs(difference):.4f} macro-F1 ({bounds})"


def _score(metrics: Mapping[str, Any], name: str) -> str:
    value, interval = metrics.get(name), metrics.get(f"{name}_interval")
    if value is None:
        return ""
    bounds = f" ({interval['low']:.4f} to {interval['high']:.4f})" if interval else ""
    return f"{value:.4f}{bounds}"
