"""A student whose vocabulary was trimmed is served as before it was."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from services.api.serving.rollout.model_loader import load_student
from services.api.serving.settings import EngineChoice, ServingDtype, ServingSettings
from services.shared.model.artifact import (
    load_classifier,
    read_artifact,
    record_golden,
    save_classifier,
    save_golden,
    seal_artifact,
)
from services.shared.model.classifier import Classifier
from services.shared.model.tokens import load_tokenizer
from services.shared.model.vocabulary import trim_config, trim_tokenizer
from tests.api.serving.artifacts import NewArtifact
from tests.api.serving.rollout.test_model_loader import promotion_of

KEPT_TEXTS = ["the room was clean", "the battery died", "a good book"]


@pytest.mark.parametrize("engine", [EngineChoice.AUTO, EngineChoice.TRANSFORMERS])
@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_texts_of_kept_pieces_get_equal_logits(
    family: str, engine: EngineChoice, new_artifact: NewArtifact, tmp_path: Path
) -> None:
    whole_dir = new_artifact(family)
    trimmed_dir = _trimmed(whole_dir, tmp_path / "trimmed")
    settings = ServingSettings(
        lanes=1, threads=1, batch_tokens=64, dtype=ServingDtype.FLOAT32, engine=engine
    )
    logits, highest = [], []
    for directory in (whole_dir, trimmed_dir):
        student = load_student(promotion_of(directory), settings)
        tokens = [each.tokens for each in student.encoder.encode(KEPT_TEXTS, truncate=True)]
        logits.append(student.engine.run(tokens))
        highest.append(max(map(max, tokens)))
        student.engine.close()
    manifest = read_artifact(trimmed_dir).manifest
    assert manifest is not None
    rows = manifest.lineage["rows"]
    assert isinstance(rows, int)
    # Its pieces are below the rows that are left, and some piece of the whole vocabulary is not.
    assert highest[1] < rows <= highest[0]
    for head, values in logits[0].items():
        np.testing.assert_array_equal(logits[1][head], values)


def _trimmed(source: Path, directory: Path) -> Path:
    """Write the artifact again with the pieces of KEPT_TEXTS alone."""
    classifier, artifact = load_classifier(source), read_artifact(source)
    found = trim_tokenizer(load_tokenizer(source), KEPT_TEXTS)
    small = load_classifier(source).backbone
    rows = classifier.backbone.get_input_embeddings().weight[found.kept]
    small.resize_token_embeddings(len(found.kept))
    with torch.no_grad():
        small.get_input_embeddings().weight.copy_(rows)
    small.config = trim_config(classifier.config, found.kept)
    trimmed = Classifier(small, artifact.heads)
    trimmed.heads = classifier.heads
    shutil.rmtree(directory, ignore_errors=True)
    save_classifier(trimmed, directory)
    found.tokenizer.save_pretrained(directory)
    tokenizer = load_tokenizer(directory)
    golden = record_golden(trimmed.eval(), tokenizer, KEPT_TEXTS, max_length=24, prefix="")
    save_golden(directory, golden)
    seal_artifact(
        directory,
        heads=artifact.heads,
        pooling=artifact.pooling,
        prefix="",
        lineage={"rows": len(found.kept)},
        metrics={},
        max_length=24,
    )
    return directory
