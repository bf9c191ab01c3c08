"""A small dataset on disk, run directories, and torchrun on them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.shared.datasets.card import Split
from services.shared.jobs.run_directory import RunDirectory, RunInput, write_json
from services.shared.training.process import StopWatch, World
from tests.factories import TINY_QWEN3, write_review_dataset

REPOSITORY = Path(__file__).parents[2]
MakeTask = Callable[..., RunInput]
Begin = Callable[..., subprocess.Popen[str]]
Torchrun = Callable[..., tuple[int, str]]

RECIPE: dict[str, Any] = {"compute": "float32", "reduce": "float32"}


def run_input(dataset_dir: Path, **changes: Any) -> RunInput:
    """Return the input that a worker writes for the ranks; `training` and `recipe` are merged."""
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
def make_task(dataset_dir: Path) -> MakeTask:
    """Return a function that makes the input of a job on the small dataset; see `run_input`."""
    return functools.partial(run_input, dataset_dir)


@pytest.fixture(scope="session")
def dataset_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = {Split.TRAIN: 200, Split.VALIDATION: 40, Split.TEST: 40}
    return write_review_dataset(tmp_path_factory.mktemp("data") / "dataset", rows, max_words=7)


@pytest.fixture(scope="session")
def begin() -> Begin:
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
def torchrun(begin: Begin) -> Torchrun:
    """Run a teacher job to its end; return its exit code and its stderr."""

    def launch(run: RunDirectory, task: RunInput, *, ranks: int = 2) -> tuple[int, str]:
        process = begin(run, task, ranks=ranks)
        try:
            _, stderr = process.communicate(timeout=240)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return process.returncode, stderr

    return launch


@pytest.fixture(scope="session")
def lone_world(process_group: None, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world of this process alone."""
    folder = tmp_path_factory.mktemp("lone")
    stopping = StopWatch(RunDirectory(folder), rank=1)  # reads no file
    return World(rank=0, size=1, device=torch.device("cpu"), stopping=stopping)
