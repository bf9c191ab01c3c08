"""Fixtures of the tests of serving."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from tests.api.serving.artifacts import NewArtifact, write_artifact


@pytest.fixture
def new_artifact(tmp_path: Path) -> NewArtifact:
    """Write artifacts of a family of backbones, each into a directory of its own."""
    numbers = itertools.count()

    def write(
        family: str, *, seed: int = 0, stored: torch.dtype = torch.float32, **changes: int
    ) -> Path:
        directory = tmp_path / f"artifact_{next(numbers)}"
        return write_artifact(directory, family, seed=seed, stored=stored, **changes)

    return write
