"""Builders that tests of several packages share: heads, dataset cards, outcomes of attempts, artifacts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.shared.datasets.card import DatasetCard, Head, Split
from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.jobs.ids import new_id
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.run_directory import Report
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.state import Reason

SENTIMENT = Head(name="sentiment", labels=["negative", "positive"])
DOMAIN = Head(name="domain", labels=["book", "computer", "hotel", "other"])


def dataset_card(heads: Sequence[Head] = (SENTIMENT,)) -> DatasetCard:
    """Return the card of a dataset of ten rows with five labels of each class."""
    return DatasetCard(
        id=new_id("ds"),
        name="reviews",
        heads=list(heads),
        rows={Split.TRAIN: 8, Split.VALIDATION: 1, Split.TEST: 1},
        label_counts={head.name: dict.fromkeys(head.labels, 5) for head in heads},
        missing_labels={head.name: 0 for head in heads},
        sha256="0" * 64,
    )


def succeeded(evaluation: dict[str, Any] | None = None) -> Outcome:
    """Return the outcome of an attempt that trained a model with the head SENTIMENT."""
    report = Report(
        outcome="succeeded",
        heads=[SENTIMENT.model_dump(mode="json")],
        parameters=10,
        size_bytes=40,
        evaluation=evaluation or {"heads": {"sentiment": {"macro_f1": 0.9}}},
    )
    return Outcome(end=End.SUCCEEDED, report=report)


def failed(reason: Reason = Reason.CRASHED) -> Outcome:
    """Return the outcome of an attempt whose rank 0 crashed."""
    return Outcome(end=End.FAILED, reason=reason, message="Rank 0 crashed.", exit_code=1)


def write_artifact(settings: JobSettings, model_id: str) -> None:
    """Write the directory of a model, with a manifest and nothing else."""
    artifact = settings.model_dir(model_id)
    artifact.mkdir(parents=True)
    (artifact / MANIFEST).write_text("{}")
