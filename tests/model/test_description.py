from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from services.shared.datasets.card import Head
from services.shared.datasets.text import TextKind
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.artifact import (
    read_artifact,
    save_classifier,
    seal_artifact,
    verify_artifact,
)
from services.shared.model.description import model_card
from services.shared.model.licence import Licence, copy_licence
from services.shared.model.tokens import load_tokenizer

if TYPE_CHECKING:
    from tests.model.conftest import MakeClassifier

METRICS = {
    "split": "test",
    "confidence": 0.95,
    "heads": {
        "sentiment": {
            "accuracy": 0.75,
            "accuracy_interval": {"low": 0.7, "high": 0.8},
            "macro_f1": 0.74,
            "ece": 0.03,
            "baseline": {"accuracy": 0.7, "macro_f1": 0.69},
            "against_baseline": {
                "macro_f1_difference": 0.05,
                "macro_f1_difference_interval": {"low": 0.01, "high": 0.09},
            },
        }
    },
}


def seal(
    directory: Path,
    make_classifier: MakeClassifier,
    tokenizer_dir: Path,
    heads: list[Head],
    *,
    made_from: dict[str, Path] | None = None,
) -> Path:
    classifier = make_classifier("qwen3")
    save_classifier(classifier, directory)
    shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True)
    seal_artifact(
        directory,
        heads=heads,
        pooling=classifier.pooling,
        prefix="",
        lineage={"kind": "distill", "job_id": "job_1"},
        metrics=METRICS,
        max_length=48,
        made_from=made_from,
    )
    return directory


def test_a_sealed_artifact_describes_its_single_head_and_length(
    tmp_path: Path, make_classifier: MakeClassifier, tokenizer_dir: Path, heads: list[Head]
) -> None:
    directory = seal(tmp_path / "model", make_classifier, tokenizer_dir, heads[:1])
    config = json.loads((directory / "config.json").read_text())
    assert config["id2label"] == {"0": "bad", "1": "good"}
    assert config["label2id"] == {"bad": 0, "good": 1}
    assert config["problem_type"] == "single_label_classification"
    assert config["architectures"] == ["Qwen3Model"]
    assert load_tokenizer(directory).model_max_length == 48
    verify_artifact(read_artifact(directory))


def test_labels_of_several_heads_are_not_in_the_config(
    tmp_path: Path, make_classifier: MakeClassifier, tokenizer_dir: Path, heads: list[Head]
) -> None:
    directory = seal(tmp_path / "model", make_classifier, tokenizer_dir, heads)
    assert "id2label" not in json.loads((directory / "config.json").read_text())


def test_a_model_card_has_labels_lineage_and_metrics(heads: list[Head]) -> None:
    card = model_card(
        heads=heads,
        text_kind=TextKind.PAIR,
        pooling=Pooling.FIRST,
        prefix="query: ",
        max_length=48,
        lineage={"job_id": "job_1"},
        metrics=METRICS,
        licences={},
    )
    assert "| sentiment | single_label | bad, good |" in card
    assert "- job_id: `job_1`" in card
    assert "| this model | sentiment | 0.7500 (0.7000 to 0.8000) | 0.7400 |" in card
    assert "| n-grams | sentiment | 0.7000 | 0.6900 |" in card
    assert (
        "- sentiment: the model is better than character n-gram counts by 0.0500 macro-F1" in card
    )
    assert "| sentiment | ece | 0.0300 |" in card
    assert "longer than 48 tokens" in card
    assert "A pair of texts" in card
    assert "The weights were trained from scratch" in card


def _model_dir(directory: Path, *, card: str, **files: str) -> Path:
    directory.mkdir()
    for name, text in {"README.md": card, **files}.items():
        (directory / name).write_text(text)
    return directory


def test_an_artifact_keeps_the_licences_of_its_base_model_and_of_its_teacher(
    tmp_path: Path, make_classifier: MakeClassifier, tokenizer_dir: Path, heads: list[Head]
) -> None:
    card = "---\nlanguage: zh\nlicense: MIT\ntags: [x]\n---\n# A model\nlicense: gpl\n"
    base = _model_dir(tmp_path / "base", card=card, LICENSE="Do as you like.")
    other = _model_dir(tmp_path / "other", card="# No metadata", NOTICE="Made by others.")
    made_from = {"base model": base, "teacher": other}
    student = seal(tmp_path / "student", make_classifier, tokenizer_dir, heads, made_from=made_from)
    found = (student / "README.md").read_text()
    assert found.startswith("---\n")
    assert "license: mit\n---" in found
    assert "- base model: `mit`, see [LICENSE](LICENSE)." in found
    assert "- teacher: not named by its model card, see [teacher-NOTICE](teacher-NOTICE)." in found
    assert (student / "LICENSE").read_text() == "Do as you like."
    manifest = read_artifact(student).manifest
    assert manifest is not None
    assert {"LICENSE", "teacher-NOTICE"} <= manifest.files.keys()
    # And on to what is made from the artifact.
    made_from = {"base model": student}
    second = seal(tmp_path / "second", make_classifier, tokenizer_dir, heads, made_from=made_from)
    assert "- base model: `mit`, see [LICENSE](LICENSE)." in (second / "README.md").read_text()


def test_an_enormous_licence_file_is_left_where_it_is(tmp_path: Path) -> None:
    base = _model_dir(tmp_path / "base", card="", LICENSE="x" * 1_000_001)
    (tmp_path / "out").mkdir()
    assert copy_licence(base, tmp_path / "out") == Licence(None)
    assert not any((tmp_path / "out").iterdir())
