"""A small dataset, a trained teacher, and a process group of one rank in the test's own process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.distiller.distill import distill
from services.shared.datasets.card import Split
from services.shared.datasets.text import plain_text
from services.shared.jobs.run_directory import Report, RunDirectory, RunInput
from services.shared.model.artifact import save_classifier, seal_artifact
from services.shared.model.batches import plan_epoch
from services.shared.model.classifier import build_classifier, build_config, initialise_heads
from services.shared.model.objective import supervised_loss
from services.shared.model.tokens import collate, read_rows, read_split, train_tokenizer
from services.shared.training.process import Position, StopWatch, World
from tests.factories import REVIEW_HEADS, TINY_QWEN3, TINY_STUDENT, write_review_dataset

TEACHER = TINY_QWEN3 | {"num_hidden_layers": 4}
MakeTask = Callable[..., RunInput]
MakeDataset = Callable[..., Path]
Distil = Callable[[RunInput], Report]

RECIPE: dict[str, Any] = {
    "compute": "float32",
    "reduce": "float32",
    "activation_checkpointing": False,
}


def make_teacher(directory: Path, dataset_dir: Path, *, epochs: int = 8) -> Path:
    """Train a teacher with a plain loop and seal it as an artifact."""
    texts = map(plain_text, read_rows(dataset_dir, Split.TRAIN, []).texts)
    tokenizer = train_tokenizer(texts, vocab_size=400, directory=directory)
    config = build_config(TEACHER, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id)
    torch.manual_seed(0)
    classifier = build_classifier(config, REVIEW_HEADS)
    initialise_heads(classifier, 0)
    split = read_split(
        dataset_dir, Split.TRAIN, REVIEW_HEADS, tokenizer=tokenizer, max_length=48, prefix=""
    )
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=3e-3)
    for epoch in range(epochs):
        for step in plan_epoch(
            split.lengths, budget_tokens=2048, batch_size=16, ranks=1, seed=0, epoch=epoch
        ):
            batch = collate(split, step.rows, tokenizer.pad_token_id)
            logits = classifier(batch.input_ids, batch.attention_mask)
            sums = supervised_loss(logits, batch.labels, REVIEW_HEADS)
            loss = torch.stack([s.total / max(1, int(s.count)) for s in sums.values()]).sum()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
    save_classifier(classifier.eval(), directory)
    seal_artifact(
        directory,
        heads=REVIEW_HEADS,
        pooling=classifier.pooling,
        prefix="",
        lineage={},
        metrics={},
        max_length=48,
    )
    return directory


def run_input(dataset_dir: Path, teacher_dir: Path, **changes: Any) -> RunInput:
    """Return the input that a worker writes for the ranks; `training` and `recipe` are merged."""
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
        "student": changes.pop("student", {"config": TINY_STUDENT, "tokenizer": "teacher"}),
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
def task(dataset_dir: Path, teacher_dir: Path) -> MakeTask:
    """Make the input of a job on the small dataset and its teacher."""

    def make(**changes: Any) -> RunInput:
        directories = {"dataset_dir": dataset_dir, "teacher_dir": teacher_dir}
        return run_input(**directories | changes)

    return make


@pytest.fixture(scope="session")
def new_dataset(tmp_path_factory: pytest.TempPathFactory) -> MakeDataset:
    """Write another dataset."""

    def make(rows: dict[Split, int], **options: Any) -> Path:
        return write_review_dataset(
            tmp_path_factory.mktemp("data") / "dataset", rows, max_words=3, **options
        )

    return make


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {Split.TRAIN: 240, Split.VALIDATION: 40, Split.TEST: 60}
    return write_review_dataset(tmp_path_factory.mktemp("data") / "dataset", rows, max_words=3)


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
def distilled(run: RunDirectory, world: World) -> Distil:
    """Distil in this process, on one rank, and return the report."""

    def start(task: RunInput) -> Report:
        return distill(run, task, world, Position())

    return start
