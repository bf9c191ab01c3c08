"""A small dataset on disk, run directories, and torchrun on them."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from services.shared.datasets.card import DatasetCard, Head, HeadType, Split
from services.shared.jobs.run_directory import RunDirectory, RunInput, write_json
from services.shared.training.process import StopWatch, World

REPOSITORY = Path(__file__).parents[2]
GOOD = ["great", "clean", "kind", "quick", "lovely"]
BAD = ["dirty", "rude", "slow", "broken", "awful"]
THINGS = {"hotel": ["room", "bed", "staff"], "book": ["page", "plot", "cover"]}
HEADS = [
    Head(name="sentiment", labels=["bad", "good"]),
    Head(name="topics", type=HeadType.MULTI_LABEL, labels=["book", "hotel"]),
]
TINY_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
RECIPE = {"compute": "float32", "reduce": "float32"}


def write_dataset(directory: Path, rows: dict[Split, int], seed: int = 0) -> Path:
    """Write texts whose labels follow from their words; every tenth label is missing."""
    draw = random.Random(seed)
    directory.mkdir(parents=True)
    for split, count in rows.items():
        table: dict[str, list[Any]] = {"text": [], "line": [], "sentiment": [], "topics": []}
        for line in range(count):
            label, topics = draw.randrange(2), sorted(draw.sample([0, 1], draw.randrange(3)))
            words = draw.choices(GOOD if label else BAD, k=draw.randrange(1, 8))
            words += [draw.choice(THINGS[["book", "hotel"][topic]]) for topic in topics]
            draw.shuffle(words)
            table["text"].append(f"{' '.join(words)} {split} {line}")
            table["line"].append(line + 1)
            table["sentiment"].append(None if line % 10 == 3 else label)
            table["topics"].append(None if line % 10 == 7 else topics)
        schema = pa.schema(
            {
                "text": pa.string(),
                "line": pa.int64(),
                "sentiment": pa.int32(),
                "topics": pa.list_(pa.int32()),
            }
        )
        pq.write_table(pa.table(table, schema=schema), directory / f"{split}.parquet")
    card = DatasetCard(
        id="ds_test",
        name="test",
        heads=HEADS,
        rows=rows,
        label_counts={},
        missing_labels={},
        sha256="0" * 64,
    )
    write_json(directory / "dataset.json", card)
    return directory


def run_input(dataset_dir: Path, **changes: Any) -> RunInput:
    """Return what a worker would write; `training`, `recipe`, `model` and `resources` are merged."""
    training = {
        "epochs": 2,
        "learning_rate": 3e-3,
        "batch_size": 16,
        "max_length": 32,
        "micro_batch_tokens": 128,
    } | changes.pop("training", {})
    recipe = RECIPE | changes.pop("recipe", {})
    spec = {
        "kind": "teacher",
        "dataset_id": "ds_test",
        "model": {"config": TINY_QWEN3, "tokenizer": {"train": True, "vocab_size": 400}},
        "training": training,
        "recipe": recipe,
    } | changes.pop("spec", {})
    return RunInput.model_validate(
        {
            "job_id": "job_test",
            "attempt": 1,
            "spec": spec,
            "dataset_dir": dataset_dir,
            "recipe": recipe,
            **changes,
        }
    )


@pytest.fixture(scope="session")
def make_task(dataset_dir: Path) -> Callable[..., RunInput]:
    """Return what a worker would write for the small dataset; see `run_input`."""
    return functools.partial(run_input, dataset_dir)


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {Split.TRAIN: 200, Split.VALIDATION: 40, Split.TEST: 40}
    return write_dataset(tmp_path_factory.mktemp("data") / "dataset", rows)


@pytest.fixture(scope="session")
def begin() -> Callable[..., subprocess.Popen[str]]:
    """Start a teacher job on some ranks."""

    def launch(run: RunDirectory, task: RunInput, *, ranks: int = 2) -> subprocess.Popen[str]:
        write_json(run.spec, task)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), "-m", "services.trainer.main", str(run.path)]
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    return launch


@pytest.fixture(scope="session")
def torchrun(begin: Callable[..., subprocess.Popen[str]]) -> Callable[..., tuple[int, str]]:
    """Run a teacher job to its end; return its exit code and what it said on stderr."""

    def launch(run: RunDirectory, task: RunInput, *, ranks: int = 2) -> tuple[int, str]:
        process = begin(run, task, ranks=ranks)
        try:
            _, said = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, said

    return launch


@pytest.fixture(scope="session")
def lone_world(process_group: None, tmp_path_factory: pytest.TempPathFactory) -> World:
    """This process alone, for what needs no second rank."""
    folder = tmp_path_factory.mktemp("lone")
    stopping = StopWatch(RunDirectory(folder), rank=1)  # looks at no file
    return World(rank=0, size=1, device=torch.device("cpu"), stopping=stopping)
