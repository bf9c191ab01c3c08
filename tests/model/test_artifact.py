from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from services.shared.datasets.card import Head
from services.shared.model.artifact import (
    InvalidArtifact,
    check_golden,
    load_classifier,
    read_artifact,
    record_golden,
    save_classifier,
    save_golden,
    seal_artifact,
    verify_artifact,
    weights_sha256,
)
from services.shared.model.calibration import Calibration
from services.shared.model.classifier import Classifier
from services.shared.model.tokens import load_tokenizer

if TYPE_CHECKING:
    from tests.model.conftest import MakeClassifier

IDS = torch.tensor([[2, 9, 8, 7, 3]])


@pytest.fixture
def artifact_dir(
    tmp_path: Path, make_classifier: MakeClassifier, tokenizer_dir: Path, heads: list[Head]
) -> Path:
    return export(tmp_path / "model", make_classifier("qwen3"), tokenizer_dir, heads)


def export(
    directory: Path,
    classifier: Classifier,
    tokenizer_dir: Path,
    heads: list[Head],
    *,
    prefix: str = "",
) -> Path:
    save_classifier(classifier, directory)
    shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True)
    tokenizer = load_tokenizer(tokenizer_dir)
    texts = ["good", "酒店"]
    golden = record_golden(classifier, tokenizer, texts, max_length=16, prefix=prefix)
    save_golden(directory, golden)
    seal_artifact(
        directory,
        heads=heads,
        pooling=classifier.pooling,
        prefix=prefix,
        lineage={"job_id": "job_1"},
        metrics={"heads": {}},
        max_length=16,
        calibration={"sentiment": Calibration(temperature=1.5)},
    )
    return directory


@pytest.mark.parametrize("kind", ["qwen3", "bert", "modernbert", "gemma2", "gpt_oss"])
def test_an_artifact_gives_the_logits_of_the_exported_model(
    kind: str,
    tmp_path: Path,
    make_classifier: MakeClassifier,
    tokenizer_dir: Path,
    heads: list[Head],
) -> None:
    classifier = make_classifier(kind)
    loaded = load_classifier(export(tmp_path, classifier, tokenizer_dir, heads))
    with torch.no_grad():
        before, after = classifier(IDS), loaded(IDS)
    assert not loaded.training
    for head in before:
        torch.testing.assert_close(after[head], before[head])


def test_plain_transformers_loads_the_backbone(
    artifact_dir: Path, make_classifier: MakeClassifier
) -> None:
    plain = AutoModel.from_pretrained(str(artifact_dir)).eval()
    expected = make_classifier("qwen3").backbone
    with torch.no_grad():
        torch.testing.assert_close(
            plain(IDS).last_hidden_state, expected(input_ids=IDS).last_hidden_state
        )


def test_an_artifact_describes_itself(artifact_dir: Path, heads: list[Head]) -> None:
    artifact = read_artifact(artifact_dir)
    assert artifact.heads == heads
    assert artifact.pooling == "last"
    assert artifact.max_length == 16
    assert artifact.calibration["sentiment"].temperature == 1.5
    manifest = artifact.manifest
    assert manifest is not None
    assert manifest.lineage == {"job_id": "job_1"}
    expected = sum(p.numel() for p in load_classifier(artifact_dir).parameters())
    assert manifest.parameters == expected
    assert manifest.size_bytes == sum(
        p.stat().st_size
        for p in artifact_dir.rglob("*")
        if p.is_file() and p.name != "manifest.json"
    )


def test_the_manifest_covers_every_file(artifact_dir: Path) -> None:
    manifest = read_artifact(artifact_dir).manifest
    assert manifest is not None
    files = (p for p in artifact_dir.rglob("*") if p.is_file())
    names = {p.relative_to(artifact_dir).as_posix() for p in files}
    assert set(manifest.files) == names - {"manifest.json"}
    verify_artifact(read_artifact(artifact_dir))


@pytest.mark.parametrize("name", ["model.safetensors", "heads.json", "tokenizer.json"])
def test_one_altered_byte_is_found_and_named(artifact_dir: Path, name: str) -> None:
    path = artifact_dir / name
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    artifact = read_artifact(artifact_dir) if name != "heads.json" else None
    with pytest.raises(InvalidArtifact, match=f"{name} is"):
        verify_artifact(artifact or read_artifact(artifact_dir))


def test_an_unsealed_artifact_is_refused(artifact_dir: Path) -> None:
    (artifact_dir / "manifest.json").unlink()
    with pytest.raises(InvalidArtifact, match="its export did not finish"):
        verify_artifact(read_artifact(artifact_dir))


def test_missing_weights_are_named_instead_of_drawn_at_random(artifact_dir: Path) -> None:
    weights = load_file(artifact_dir / "model.safetensors")
    del weights["norm.weight"]
    save_file(weights, artifact_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidArtifact, match=r"weights are missing, among them norm\.weight"):
        load_classifier(artifact_dir)


def test_heads_of_another_width_are_refused(artifact_dir: Path) -> None:
    weights = load_file(artifact_dir / "classifier_heads.safetensors")
    weights["topics.weight"] = torch.zeros(3, 8)
    save_file(weights, artifact_dir / "classifier_heads.safetensors")
    with pytest.raises(InvalidArtifact, match=r"topics.weight is \[3, 8\]"):
        load_classifier(artifact_dir)


def test_heads_that_are_not_in_the_weights_are_refused(artifact_dir: Path) -> None:
    about = json.loads((artifact_dir / "heads.json").read_text())
    about["heads"][0]["labels"].append("neutral")
    (artifact_dir / "heads.json").write_text(json.dumps(about))
    with pytest.raises(InvalidArtifact, match="does not contain head sentiment of 3 labels"):
        load_classifier(artifact_dir)


def test_a_directory_that_is_not_an_artifact_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArtifact, match=r"has no heads\.json"):
        load_classifier(tmp_path)


def test_golden_texts_pass_on_the_exported_model(artifact_dir: Path, tokenizer_dir: Path) -> None:
    worst = check_golden(artifact_dir, load_classifier(artifact_dir), load_tokenizer(tokenizer_dir))
    assert worst is not None
    assert worst < 1e-5


def test_golden_texts_fail_on_another_model(
    artifact_dir: Path, tokenizer_dir: Path, make_classifier: MakeClassifier
) -> None:
    with pytest.raises(InvalidArtifact, match="golden texts logits off by"):
        check_golden(artifact_dir, make_classifier("qwen3", seed=9), load_tokenizer(tokenizer_dir))


def test_golden_texts_fail_on_a_model_with_nan_logits(
    artifact_dir: Path, tokenizer_dir: Path
) -> None:
    broken = load_classifier(artifact_dir)
    broken.heads.get_parameter("topics.bias").data.fill_(torch.nan)
    with pytest.raises(InvalidArtifact, match="logits off by nan"):
        check_golden(artifact_dir, broken, load_tokenizer(tokenizer_dir))


def test_the_hash_of_weights_changes_with_one_number(artifact_dir: Path) -> None:
    before = weights_sha256(artifact_dir)
    weights = load_file(artifact_dir / "classifier_heads.safetensors")
    weights["topics.bias"][0] += 1e-6
    save_file(weights, artifact_dir / "classifier_heads.safetensors")
    assert weights_sha256(artifact_dir) != before


def test_a_model_can_be_loaded_in_another_precision(artifact_dir: Path) -> None:
    loaded = load_classifier(artifact_dir, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
