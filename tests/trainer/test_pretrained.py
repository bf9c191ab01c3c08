"""Two layers of real pretrained models become classifiers: an encoder that reads Chinese, and a decoder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from services.shared.jobs.run_directory import Report, RunDirectory, read_record
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.artifact import (
    check_golden,
    load_classifier,
    read_artifact,
    record_golden,
)
from services.shared.model.tokens import load_tokenizer
from services.shared.training.process import Position, World
from services.trainer.finetune import finetune
from tests.pretrained_models import first_layers, pretrained_model

if TYPE_CHECKING:
    from tests.trainer.conftest import MakeTask


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["multilingual-e5-small", "smollm2-135m"])
def test_a_pretrained_model_learns_and_its_artifact_answers_alike(
    name: str, lone_world: World, make_task: MakeTask, tmp_path: Path
) -> None:
    base = first_layers(pretrained_model(name), tmp_path / name, count=2)
    run = RunDirectory(tmp_path / "run")
    # Twelve steps on reviews of one sentiment word each.
    task = make_task(
        training={"epochs": 1, "learning_rate": 1e-3},
        spec={"model": {"path": name, "trim_vocabulary": True}},
        model_dir=base,
    )
    finetune(run, task, lone_world, Position())
    report = read_record(run.report, Report)
    assert report is not None
    assert report.evaluation["heads"]["sentiment"]["accuracy"] > 0.8
    assert "accuracy_interval" in report.evaluation["heads"]["sentiment"]

    assert (run.export / "LICENSE").read_text() == (base / "LICENSE").read_text()
    card = (run.export / "README.md").read_text()
    # A directory that a former version fetched does not name the licence in its card, but has it.
    assert re.search(r"^- base model: .+, see \[LICENSE\]\(LICENSE\)\.$", card, re.MULTILINE)

    artifact = read_artifact(run.export)
    assert artifact.pooling is (Pooling.LAST if name == "smollm2-135m" else Pooling.MEAN)
    classifier, tokenizer = load_classifier(run.export), load_tokenizer(run.export)
    difference = check_golden(run.export, classifier, tokenizer)
    assert difference is not None
    assert difference < 1e-4
    labels = next(head.labels for head in artifact.heads if head.name == "sentiment")
    answers = record_golden(
        classifier,
        tokenizer,
        ["great and lovely", "dirty and rude"],
        max_length=32,
        prefix=artifact.prefix,
    )
    predicted = [labels[int(np.argmax(text.logits["sentiment"]))] for text in answers.texts]
    assert predicted == ["good", "bad"]
