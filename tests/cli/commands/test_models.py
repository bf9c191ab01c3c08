"""What `stillhouse models show` prints of a model's evaluation."""

from __future__ import annotations

from io import StringIO
from typing import Any

from services.cli.commands.models import print_evaluation
from services.cli.terminal import Console


def _scores(value: float) -> dict[str, Any]:
    interval = {"low": value - 0.02, "high": value + 0.02}
    return {
        "accuracy": value,
        "macro_f1": value,
        "accuracy_interval": interval,
        "macro_f1_interval": interval,
    }


def _shown(metrics: dict[str, Any] | None) -> str:
    output = StringIO()
    model: Any = {"kind": "distill", "metrics": metrics}
    print_evaluation(model, Console(file=output, width=100))
    return " ".join(output.getvalue().split())


def test_a_student_is_shown_with_its_teacher_its_baseline_and_intervals() -> None:
    gains = {
        "tone": ({"low": 0.01, "high": 0.05}, 0.03),
        "genre": ({"low": -0.02, "high": 0.02}, 0.0),
    }
    heads = {
        head: _scores(0.83)
        | {
            "baseline": _scores(0.8),
            "against_baseline": {
                "macro_f1_difference": gain,
                "macro_f1_difference_interval": interval,
            },
        }
        for head, (interval, gain) in gains.items()
    }
    teacher = {"heads": {head: _scores(0.85) for head in gains}}
    shown = _shown({"split": "test", "confidence": 0.9, "heads": heads, "teacher": teacher})
    assert "test split, 90% intervals" in shown
    for model, score in (("student", "0.83"), ("teacher", "0.85"), ("n-grams", "0.80")):
        assert f"{model} │ tone │ {score}00 (" in shown
    assert "tone: the student is better than character n-gram counts by 0.0300 macro-F1" in shown
    assert "WARNING: genre: the student is not better than character n-gram counts" in shown


def test_a_model_without_an_evaluation_shows_none() -> None:
    assert _shown(None) == ""
