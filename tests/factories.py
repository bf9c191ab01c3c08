"""Builders that tests of several packages share: heads, dataset cards, outcomes of attempts, artifacts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from services.shared.datasets.card import DatasetCard, Head, HeadType, Split
from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.jobs.db.store import Store
from services.shared.jobs.documents import Evaluation, JobPlanDict, ModelHeadDict, RecipeFields
from services.shared.jobs.errors import prefix_field
from services.shared.jobs.ids import new_id
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.planning.spec_changes import change_spec
from services.shared.jobs.resolved_spec import PlannedSpec
from services.shared.jobs.run_directory import Report, write_json
from services.shared.jobs.settings import JobSettings
from services.shared.jobs.spec import ChainSpec, DistillSpec, Recipe, TeacherSpec
from services.shared.jobs.state import Reason
from services.shared.jobs.views import JobView
from services.shared.memory.forensics.diagnosis import DiagnosisDict

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


def succeeded(evaluation: Evaluation | None = None) -> Outcome:
    """Return the outcome of an attempt that trained a model with the head SENTIMENT."""
    report = Report(
        outcome="succeeded",
        heads=[cast("ModelHeadDict", SENTIMENT.model_dump(mode="json"))],
        parameters=10,
        size_bytes=40,
        evaluation=evaluation or {"heads": {"sentiment": {"macro_f1": 0.9}}},
    )
    return Outcome(end=End.SUCCEEDED, report=report)


def failed(reason: Reason = Reason.CRASHED) -> Outcome:
    """Return the outcome of an attempt whose rank 0 crashed."""
    return Outcome(end=End.FAILED, reason=reason, message="Rank 0 crashed.", exit_code=1)


def plan_document(**fields: object) -> JobPlanDict:
    """Return a stored plan of some fields, as an older version or a test may have written it."""
    return cast("JobPlanDict", fields)


def diagnosis_document(**fields: object) -> DiagnosisDict:
    """Return a stored diagnosis of some fields."""
    return cast("DiagnosisDict", fields)


def write_artifact(settings: JobSettings, model_id: str) -> None:
    """Write the directory of a model, with a manifest and nothing else."""
    artifact = settings.model_dir(model_id)
    artifact.mkdir(parents=True)
    (artifact / MANIFEST).write_text("{}")


GOOD = ["great", "clean", "kind", "quick", "lovely"]
BAD = ["dirty", "rude", "slow", "broken", "awful"]
THINGS = {"hotel": ["room", "bed", "staff"], "book": ["page", "plot", "cover"]}
REVIEW_HEADS = [
    Head(name="sentiment", labels=["bad", "good"]),
    Head(name="topics", type=HeadType.MULTI_LABEL, labels=["book", "hotel"]),
]
TINY_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
# A student for a teacher of TINY_QWEN3 with four layers.
TINY_STUDENT = TINY_QWEN3 | {"hidden_size": 24, "intermediate_size": 48}


def write_review_dataset(
    directory: Path,
    rows: dict[Split, int],
    *,
    max_words: int,
    seed: int = 0,
    heads: list[Head] = REVIEW_HEADS,
    dataset_id: str = "ds_test",
) -> Path:
    """Write a stored dataset whose labels follow from its words; every tenth label is missing.

    `max_words` is the largest number of words that carry the sentiment of a text.
    """
    draw = random.Random(seed)
    directory.mkdir(parents=True)
    for split, count in rows.items():
        table: dict[str, list[Any]] = {"text": [], "line": [], "sentiment": [], "topics": []}
        for line in range(count):
            label, topics = draw.randrange(2), sorted(draw.sample([0, 1], draw.randrange(3)))
            words = draw.choices(GOOD if label else BAD, k=draw.randrange(1, max_words + 1))
            words += [draw.choice(THINGS[["book", "hotel"][topic]]) for topic in topics]
            draw.shuffle(words)
            words.append(f"{split} {line}" if seed == 0 else f"{split} {seed} {line}")
            table["text"].append(" ".join(words))
            table["line"].append(line + 1)
            table["sentiment"].append(None if line % 10 == 3 else label)
            table["topics"].append(None if line % 10 == 7 else topics)
        known = {"text", "line", *(head.name for head in heads)}
        types = {
            "text": pa.string(),
            "line": pa.int64(),
            "sentiment": pa.int32(),
            "topics": pa.list_(pa.int32()),
        }
        schema = pa.schema({key: kind for key, kind in types.items() if key in known})
        columns = {key: values for key, values in table.items() if key in known}
        pq.write_table(pa.table(columns, schema=schema), directory / f"{split}.parquet")
    card = DatasetCard(
        id=dataset_id,
        name=dataset_id,
        heads=heads,
        rows=rows,
        label_counts={},
        missing_labels={},
        sha256="0" * 64,
    )
    write_json(directory / "dataset.json", card)
    return directory


def create_job(
    store: Store,
    spec: TeacherSpec | DistillSpec,
    *,
    plan: JobPlanDict | None = None,
    recipe: Recipe | None = None,
    idempotency_key: str | None = None,
) -> tuple[JobView, bool]:
    """Resolve a spec and store its job as the API does, with any plan; return it and whether it is new."""
    planned = PlannedSpec(store.resolve(spec), plan, recipe)
    return store.create_job(planned, idempotency_key=idempotency_key)


def create_chain(
    store: Store,
    chain: ChainSpec,
    *,
    teacher_plan: JobPlanDict | None = None,
    distill_plan: JobPlanDict | None = None,
    teacher_recipe: Recipe | None = None,
    distill_recipe: Recipe | None = None,
    idempotency_key: str | None = None,
) -> tuple[JobView, bool]:
    """Resolve a chain and store both jobs as the API does, with any plans."""
    with prefix_field("teacher"):
        teacher = store.resolve(chain.teacher_spec())
    with prefix_field("distill"):
        distill = store.resolve(chain.distill_spec(), chained=teacher)
    return store.create_chain(
        chain,
        teacher=PlannedSpec(teacher, teacher_plan, teacher_recipe),
        distill=PlannedSpec(distill, distill_plan, distill_recipe),
        idempotency_key=idempotency_key,
    )


def retry_job(
    store: Store,
    job_id: str,
    *,
    recipe_changes: RecipeFields | None = None,
    training_changes: dict[str, Any] | None = None,
    plan: JobPlanDict | None = None,
    idempotency_key: str | None = None,
) -> tuple[JobView, bool]:
    """Change a job's spec and store the job that repeats it, as the API does."""
    former = store.job(job_id)
    changed = change_spec(
        former.spec,
        recipe=former.recipe,
        recipe_changes=recipe_changes or {},
        training_changes=training_changes or {},
    )
    return store.retry(job_id, changed, plan=plan, idempotency_key=idempotency_key)
