from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from services.shared.datasets.card import Head
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.artifact import load_classifier
from services.shared.model.classifier import initialise_heads, wrap_backbone
from services.shared.model.export_formats import NotConvertible, export_artifact
from services.shared.model.sequence_classification import NotExpressible
from tests.model.test_artifact import IDS, export

if TYPE_CHECKING:
    from tests.model.conftest import MakeClassifier


@pytest.mark.parametrize(
    "kind", ["qwen3", "llama", "bert", "xlm-roberta", "modernbert", "distilbert"]
)
def test_each_head_is_exported_as_a_directory_that_transformers_loads(
    kind: str,
    tmp_path: Path,
    make_classifier: MakeClassifier,
    tokenizer_dir: Path,
    heads: list[Head],
) -> None:
    artifact = export(tmp_path / "model", make_classifier(kind), tokenizer_dir, heads)
    (tmp_path / "out").mkdir()  # an empty directory is filled
    found = export_artifact(artifact, format="transformers", out=tmp_path / "out")
    assert set(found) == {"sentiment", "topics"}
    expected = load_classifier(artifact)(IDS)
    for head in heads:
        model = AutoModelForSequenceClassification.from_pretrained(
            str(tmp_path / "out" / head.name)
        )
        torch.testing.assert_close(model.eval()(IDS).logits, expected[head.name])
        assert list(model.config.id2label.values()) == head.labels
        card = (tmp_path / "out" / head.name / "README.md").read_text()
        assert f"gives the logits of the head `{head.name}`" in card
        assert "refuses this directory" not in card


@pytest.mark.filterwarnings("ignore")  # the exporter's own
@pytest.mark.parametrize(  # five to ten seconds each
    ("kind", "pooling"),
    [
        ("qwen3", None),
        ("bert", None),
        ("xlm-roberta", Pooling.MEAN),
        ("modernbert", Pooling.MEAN),
        ("mixtral", None),
    ],
)
def test_onnx_runtime_gives_the_logits_of_the_artifact(
    kind: str,
    pooling: Pooling | None,
    tmp_path: Path,
    make_classifier: MakeClassifier,
    tokenizer_dir: Path,
    heads: list[Head],
) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    classifier = wrap_backbone(make_classifier(kind).backbone, heads, pooling=pooling).eval()
    initialise_heads(classifier, seed=0)
    torch.nn.init.ones_(classifier.heads.get_parameter("sentiment.bias"))
    artifact = export(tmp_path / "model", classifier, tokenizer_dir, heads)
    found = export_artifact(artifact, format="onnx", out=tmp_path / "out")
    assert max(found.values()) < 1e-5
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    ids = IDS.repeat(3, 1)  # a batch size that the exporter did not see
    feed = {"input_ids": ids.numpy(), "attention_mask": torch.ones_like(ids).numpy()}
    (logits,) = session.run(["sentiment"], feed)
    torch.testing.assert_close(torch.from_numpy(logits), classifier(ids)["sentiment"].detach())
    assert "one output of logits for each head" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / "labels.json").read_text())["max_length"] == 16


def test_a_failed_export_leaves_nothing_and_an_existing_directory_is_kept(
    tmp_path: Path, make_classifier: MakeClassifier, tokenizer_dir: Path, heads: list[Head]
) -> None:
    classifier = make_classifier("electra")
    artifact = export(tmp_path / "model", classifier, tokenizer_dir, heads)
    out = tmp_path / "exports" / "out"
    with pytest.raises(NotExpressible):
        export_artifact(artifact, format="transformers", out=out)
    assert not any(out.parent.iterdir())
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError):
        export_artifact(artifact, format="transformers", out=out)
    assert [path.name for path in out.parent.rglob("*")] == ["out", "notes.txt"]


def test_what_the_exporter_cannot_convert_is_refused_in_a_sentence(
    tmp_path: Path,
    make_classifier: MakeClassifier,
    tokenizer_dir: Path,
    heads: list[Head],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime")

    def fail(*_arguments: object, **_options: object) -> None:
        raise torch.onnx.OnnxExporterError("no operator for this") from ValueError("a\nb")

    monkeypatch.setattr(torch.onnx, "export", fail)
    artifact = export(tmp_path / "model", make_classifier("bert"), tokenizer_dir, heads)
    with pytest.raises(NotConvertible, match=r"cannot convert bert to ONNX: a$"):
        export_artifact(artifact, format="onnx", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_decoder_with_a_bias_is_not_exported_to_transformers(
    tmp_path: Path, make_classifier: MakeClassifier, tokenizer_dir: Path, heads: list[Head]
) -> None:
    classifier = make_classifier("qwen3")
    torch.nn.init.ones_(classifier.heads.get_parameter("sentiment.bias"))
    artifact = export(tmp_path / "model", classifier, tokenizer_dir, heads)
    with pytest.raises(NotExpressible, match="no bias"):
        export_artifact(artifact, format="transformers", out=tmp_path / "out")
