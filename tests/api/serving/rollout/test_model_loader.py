"""Loading an artifact until it serves."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from services.api.serving.engines.packed_engine import PackedEngine
from services.api.serving.engines.packed_weights import Backbone
from services.api.serving.engines.throttle import throttled
from services.api.serving.memory_headroom import LOADING_PEAK_RATIO, serving_bytes
from services.api.serving.predictor import Predictor
from services.api.serving.promotion import Promotion, StudentRefused
from services.api.serving.quantization.int8_linear import activation_limit
from services.api.serving.quantization.record import (
    QuantizationRecord,
    manifest_sha256_of,
    write_quantization_record,
)
from services.api.serving.quantization.weights_file import save_int8_weights
from services.api.serving.rollout.model_loader import load_student
from services.api.serving.settings import ServingDtype, ServingSettings
from services.shared.files.hashing import file_sha256
from services.shared.files.sealed_json import seal, unseal
from services.shared.model.artifact import InvalidArtifact, load_classifier
from services.shared.model.tokens import encode, load_tokenizer
from tests.api.serving.artifacts import NewArtifact

TEXTS = ["the room was clean", "the battery died after two days", "a", "good book " * 9]
SETTINGS = ServingSettings(lanes=1, threads=1, batch_tokens=64, dtype=ServingDtype.FLOAT32)


def promotion_of(directory: Path) -> Promotion:
    return Promotion("prm_1", "default", "mdl_1", "reviews", "mdl_1", directory)


def reseal(directory: Path) -> None:
    """Update the hashes in the manifest."""
    path = directory / "manifest.json"
    manifest = unseal(path.read_bytes())
    manifest["files"] = {name: file_sha256(directory / name) for name in manifest["files"]}
    path.write_text(json.dumps(seal(manifest)))


@pytest.mark.parametrize("family", ["qwen3", "bert", "gpt2"])
def test_a_loaded_student_answers_like_the_transformers_forward_pass(
    family: str, new_artifact: NewArtifact
) -> None:
    directory = new_artifact(family)
    student = load_student(promotion_of(directory), SETTINGS)
    encoded = student.encoder.encode(TEXTS, truncate=True)
    tokens, cut = encode(TEXTS, load_tokenizer(directory), max_length=student.max_length, prefix="")
    assert [each.tokens for each in encoded] == tokens
    assert [each.truncated for each in encoded] == cut
    logits = student.engine.run(tokens)
    classifier = load_classifier(directory)
    for index, ids in enumerate(tokens):
        with torch.inference_mode():
            plain = classifier(torch.tensor([ids]))
        for head, values in plain.items():
            np.testing.assert_allclose(logits[head][index], values[0].numpy(), atol=1e-4)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_an_embedding_stays_in_the_dtype_it_was_stored_in(
    new_artifact: NewArtifact, stored: torch.dtype
) -> None:
    directory = new_artifact("qwen3", stored=stored)
    engine = load_student(promotion_of(directory), SETTINGS).engine
    assert isinstance(engine, PackedEngine)
    assert isinstance(engine.backbone, Backbone)
    assert (engine.dtype, engine.backbone.embedding.dtype) == (torch.float32, stored)
    with torch.inference_mode():
        plain = load_classifier(directory, dtype=torch.float32)(torch.tensor([[5, 9, 7, 30]]))
    for head, logits in engine.run([[5, 9, 7, 30]]).items():
        np.testing.assert_allclose(logits, plain[head].numpy(), atol=1e-4)


def test_supported_families_run_packed_and_others_padded(new_artifact: NewArtifact) -> None:
    assert (
        load_student(promotion_of(new_artifact("qwen3")), SETTINGS).engine.kind == "packed-float32"
    )
    bert = load_student(promotion_of(new_artifact("bert")), SETTINGS)
    assert bert.engine.kind == "packed-float32"
    other = load_student(promotion_of(new_artifact("gpt2")), SETTINGS)
    assert other.engine.kind == "transformers-float32"


def test_a_student_that_answers_its_golden_texts_differently_is_refused(
    new_artifact: NewArtifact,
) -> None:
    directory = new_artifact("qwen3")
    weights = load_file(directory / "classifier_heads.safetensors")
    save_file({k: -30 * v for k, v in weights.items()}, directory / "classifier_heads.safetensors")
    reseal(directory)
    with pytest.raises(StudentRefused, match="golden"):
        load_student(promotion_of(directory), SETTINGS)


def test_an_artifact_that_was_altered_is_refused(new_artifact: NewArtifact) -> None:
    directory = new_artifact("qwen3")
    weights = load_file(directory / "classifier_heads.safetensors")
    save_file({k: v + 1 for k, v in weights.items()}, directory / "classifier_heads.safetensors")
    with pytest.raises(InvalidArtifact, match="classifier_heads"):
        load_student(promotion_of(directory), SETTINGS)


@pytest.mark.anyio
async def test_a_predictor_serves_the_promoted_student(new_artifact: NewArtifact) -> None:
    directory = new_artifact("qwen3")
    predictor = Predictor(SETTINGS, promotions=lambda: [promotion_of(directory)])

    predictor.start()
    for _ in range(3000):
        if predictor.active() is not None:
            break
        await asyncio.sleep(0.01)
    [answer] = await predictor.predict(["the room was clean"], truncate=False)
    assert answer.model == "reviews"
    assert set(answer.scores) == {"tone", "topics"}
    assert sum(score.score for score in answer.scores["tone"]) == pytest.approx(1.0)
    student = predictor.active()
    assert student is not None
    await predictor.stop()
    assert await asyncio.to_thread(student.closed.wait, 20)


def test_a_predictor_without_a_student_does_not_import_torch() -> None:
    script = (
        "import sys\n"
        "from services.api.serving.predictor import Predictor\n"
        "predictor = Predictor(promotions=list)\n"
        "predictor.start()\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_new_heads_on_the_same_backbone_share_its_weights(new_artifact: NewArtifact) -> None:
    first = load_student(promotion_of(new_artifact("qwen3")), SETTINGS)
    directory = new_artifact("qwen3")  # the same seed: the same backbone
    weights = load_file(directory / "classifier_heads.safetensors")
    flipped = {k: v.flip(0).contiguous() for k, v in weights.items()}
    save_file(flipped, directory / "classifier_heads.safetensors")
    golden = json.loads((directory / "golden.json").read_text())
    for text in golden["texts"]:
        text["logits"] = {head: values[::-1] for head, values in text["logits"].items()}
    (directory / "golden.json").write_text(json.dumps(golden))
    reseal(directory)

    second = load_student(promotion_of(directory), SETTINGS, serving=[first])
    assert isinstance(first.engine, PackedEngine)
    assert isinstance(second.engine, PackedEngine)
    assert second.engine.shares_weights_with(first.engine)
    before = first.engine.run([[5, 6, 7]])
    first.engine.close()
    after = second.engine.run([[5, 6, 7]])
    for head in before:
        np.testing.assert_allclose(after[head], before[head][:, ::-1], atol=1e-5)


def test_another_backbone_shares_nothing(new_artifact: NewArtifact) -> None:
    first = load_student(promotion_of(new_artifact("qwen3")), SETTINGS)
    second = load_student(promotion_of(new_artifact("qwen3", seed=1)), SETTINGS, serving=[first])
    assert isinstance(first.engine, PackedEngine)
    assert isinstance(second.engine, PackedEngine)
    assert not second.engine.shares_weights_with(first.engine)


def test_a_student_that_has_passed_its_gate_is_reloaded_in_8_bits_instead_of_sharing_weights(
    new_artifact: NewArtifact,
) -> None:
    directory = new_artifact("qwen3")
    first = load_student(promotion_of(directory), SETTINGS)
    classifier = load_classifier(directory)
    digest = save_int8_weights(classifier, directory, max_length=24)
    passed = QuantizationRecord(
        manifest_sha256=manifest_sha256_of(directory),
        weights_sha256=digest,
        largest_activation=activation_limit(),
        calibration_texts=0,
        heads={},
        passed=True,
    )
    write_quantization_record(directory, passed)
    settings = SETTINGS.model_copy(update={"compile": False})
    second = load_student(promotion_of(directory), settings, serving=[first])
    assert second.engine.kind == "packed-int8"


def test_loading_next_to_an_active_student_stays_within_the_memory_check(
    new_artifact: NewArtifact,
) -> None:
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6}
    first, second = (
        new_artifact("qwen3", seed=seed, stored=torch.bfloat16, **shape) for seed in (0, 1)
    )
    script = Path(__file__).parent / "loading_peak.py"
    command = [sys.executable, str(script), str(first), str(second)]
    done = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    served = serving_bytes(second, bytes_per_weight=4)
    peak = int(done.stdout.splitlines()[-1])
    # Besides the weights there are one block being converted and buffers of constant size.
    assert 0.5 * served < peak < LOADING_PEAK_RATIO * served + 96 * 1024**2


def test_throttled_loading_pauses_between_blocks_and_layers(
    new_artifact: NewArtifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    directory = new_artifact("qwen3")
    clock = SimpleNamespace(sleep=pauses.append, monotonic=time.monotonic)
    monkeypatch.setattr("services.api.serving.engines.throttle.time", clock)
    load_student(promotion_of(directory), SETTINGS)
    assert pauses == []
    with throttled(lambda: True):
        load_student(promotion_of(directory), SETTINGS)
    assert (
        len(pauses) >= 3 * 3
    )  # three layers, converted, checked against the golden texts, warmed up
