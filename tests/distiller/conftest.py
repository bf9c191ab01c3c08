"""A small dataset, a trained teacher, and a process group of one rank in the test's own process."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from services.distiller.distill import distill
from services.shared.datasets.card import DatasetCard, Head, HeadType, Split
from services.shared.jobs.run_directory import Report, RunDirectory, RunInput, write_json
from services.shared.model.artifact import save_classifier, seal_artifact
from services.shared.model.batches import plan_epoch
from services.shared.model.classifier import build_classifier, init_heads, make_config
from services.shared.model.objective import supervised_loss
from services.shared.model.tokens import collate, read_rows, read_split, train_tokenizer
from services.shared.training.process import Position, StopWatch, World

GOOD = ["great", "clean", "kind", "quick", "lovely"]
BAD = ["dirty", "rude", "slow", "broken", "awful"]
THINGS = {"hotel": ["room", "bed", "staff"], "book": ["page", "plot", "cover"]}
HEADS = [
    Head(name="sentiment", labels=["bad", "good"]),
    Head(name="topics", type=HeadType.MULTI_LABEL, labels=["book", "hotel"]),
]
TEACHER = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
STUDENT = TEACHER | {"hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2}
RECIPE = {"compute": "float32", "reduce": "float32", "activation_checkpointing": False}


def write_dataset(
    directory: Path,
    rows: dict[Split, int],
    *,
    seed: int = 0,
    heads: list[Head] = HEADS,
    name: str = "ds_test",
) -> Path:
    """Write texts whose labels follow from their words; every tenth label is missing."""
    draw = random.Random(seed)
    directory.mkdir(parents=True)
    for split, count in rows.items():
        table: dict[str, list[Any]] = {"text": [], "line": [], "sentiment": [], "topics": []}
        for line in range(count):
            label, topics = draw.randrange(2), sorted(draw.sample([0, 1], draw.randrange(3)))
            words = draw.choices(GOOD if label else BAD, k=draw.randrange(1, 4))
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
        id=name,
        name=name,
        heads=heads,
        rows=rows,
        label_counts={},
        missing_labels={},
        sha256="0" * 64,
    )
    write_json(directory / "dataset.json", card)
    return directory


def make_teacher(directory: Path, dataset_dir: Path, *, epochs: int = 8) -> Path:
    """Train a teacher with a plain loop and seal it as an artifact."""
    texts = read_rows(dataset_dir, Split.TRAIN, []).texts
    tokenizer = train_tokenizer(texts, vocab_size=400, directory=directory)
    config = make_config(TEACHER, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    classifier = build_classifier(config, HEADS)
    init_heads(classifier, 0)
    split = read_split(dataset_dir, Split.TRAIN, HEADS, tokenizer=tokenizer, max_length=48)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for step in plan_epoch(
            split.lengths, budget_tokens=2048, batch_size=16, ranks=1, seed=0, epoch=epoch
        ):
            batch = collate(split, step.rows, tokenizer.pad_token_id)
            logits = classifier(batch.input_ids, batch.attention_mask)
            sums = supervised_loss(logits, batch.labels, HEADS)
            loss = torch.stack([s.total / max(1, int(s.count)) for s in sums.values()]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    save_classifier(classifier.eval(), directory)
    seal_artifact(
        directory,
        heads=HEADS,
        pooling=classifier.pooling,
        lineage={},
        metrics={},
        max_length=48,
    )
    return directory


def run_input(dataset_dir: Path, teacher_dir: Path, **changes: Any) -> RunInput:
    """Return what a worker would write; `training`, `recipe`, `distillation`, `student` are merged."""
    recipe = RECIPE | changes.pop("recipe", {})
    training = {
        "epochs": 2,
        "learning_rate": 3e-3,
        "batch_size": 16,
        "max_length": 48,
        "micro_batch_tokens": 256,
    } | changes.pop("training", {})
    spec = {
        "kind": "distill",
        "dataset_id": "ds_test",
        "teacher": {"path": "teacher"},
        "student": changes.pop("student", {"config": STUDENT, "tokenizer": "teacher"}),
        "training": training,
        "recipe": recipe,
        "distillation": changes.pop("distillation", {}),
    } | changes.pop("spec", {})
    return RunInput.model_validate(
        {
            "job_id": "job_test",
            "attempt": 1,
            "spec": spec,
            "dataset_dir": dataset_dir,
            "teacher_dir": teacher_dir,
            "recipe": recipe,
            **changes,
        }
    )


@pytest.fixture(scope="session")
def task(dataset_dir: Path, teacher_dir: Path):
    """Make the input of a job on the small dataset and its teacher."""

    def make(**changes: Any) -> RunInput:
        places = {"dataset_dir": dataset_dir, "teacher_dir": teacher_dir}
        return run_input(**places | changes)

    return make


@pytest.fixture(scope="session")
def new_dataset(tmp_path_factory: pytest.TempPathFactory):
    """Write another dataset."""

    def make(rows: dict[Split, int], **options: Any) -> Path:
        return write_dataset(tmp_path_factory.mktemp("data") / "dataset", rows, **options)

    return make


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {Split.TRAIN: 240, Split.VALIDATION: 40, Split.TEST: 60}
    return write_dataset(tmp_path_factory.mktemp("data") / "dataset", rows)


@pytest.fixture(scope="session")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory, dataset_dir: Path) -> Path:
    return make_teacher(tmp_path_factory.mktemp("models") / "teacher", dataset_dir)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def world(process_group: None, run: RunDirectory) -> World:
    return World(rank=0, size=1, device=torch.device("cpu"), stopping=StopWatch(run, 0))


@pytest.fixture
def distilled(run: RunDirectory, world: World):
    """Distil in this process, on one rank, and return the report."""

    def start(task: RunInput) -> Report:
        return distill(run, task, world, Position())

    return start
