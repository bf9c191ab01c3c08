"""Int8 products, the smoothing of activations, and the gate that decides whether int8 may serve."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray

from services.api.serving.engines.linear import LinearWeights
from services.api.serving.prediction import FloatArray
from services.api.serving.quantization.int8_linear import (
    INT8_MAX,
    INT8_MAX_WITHOUT_VNNI,
    Int8Linear,
    Int8Ops,
    activation_limit,
    compiled_int8_ops,
    quantize_activations,
    quantize_weights,
)
from services.api.serving.quantization.quantize import compare_heads, quantize_student
from services.api.serving.quantization.record import (
    QuantizationRecord,
    int8_weights_path,
    read_quantization_record,
    write_quantization_record,
)
from services.api.serving.quantization.smoothquant import activation_maxima, smooth
from services.api.serving.rollout.model_loader import build_engine
from services.api.serving.settings import EngineChoice, ServingDtype, ServingSettings
from services.shared.datasets.card import Head, HeadType
from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.model.artifact import load_classifier, read_artifact
from services.shared.model.calibration import Calibration
from services.shared.model.tokens import Rows
from tests.api.serving.artifacts import NewArtifact

SETTINGS = ServingSettings(threads=1, dtype=ServingDtype.FLOAT32, compile=False)
WORDS = [
    "the",
    "room",
    "was",
    "clean",
    "and",
    "staff",
    "kind",
    "battery",
    "died",
    "a",
    "good",
    "book",
    "about",
    "food",
]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A dataset of random sentences with labels for both heads."""
    random = np.random.default_rng(5)
    for split, size in (("train", 40), ("validation", 10), ("test", 60)):
        texts = [" ".join(random.choice(WORDS, random.integers(1, 9))) for _ in range(size)]
        table = {
            "text": texts,
            "line": list(range(1, size + 1)),
            "tone": pa.array(random.integers(0, 2, size), pa.int32()),
            "topics": pa.array([[0], [1, 2]] * (size // 2), pa.list_(pa.int32())),
        }
        pq.write_table(pa.table(table), tmp_path / f"{split}.parquet")
    return tmp_path


def test_an_8_bit_product_is_within_two_percent_of_the_exact_one() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(33, 64) * 5
    x[3] = 0.0
    exact = torch.nn.functional.linear(x, weight, bias)
    given = Int8Linear(quantize_weights(LinearWeights(weight, bias)), Int8Ops())(x)
    # 1.3 % with activations limited to +-63; less with +-127, on CPUs with VNNI.
    assert ((given - exact).norm() / exact.norm()).item() < 0.02
    torch.testing.assert_close(given[3], bias)


def test_products_of_the_largest_values_do_not_overflow() -> None:
    x, weight = torch.full((16, 256), 3.0), torch.full((64, 256), 2.0)
    given = Int8Linear(quantize_weights(LinearWeights(weight, None)), Int8Ops())(torch.cat([x, -x]))
    exact = torch.nn.functional.linear(torch.cat([x, -x]), weight)
    torch.testing.assert_close(given, exact, atol=0.0, rtol=1e-5)


def test_an_outlier_in_one_token_does_not_affect_the_others() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 64)
    x[2, 7] = 1000.0
    tokens, scale = quantize_activations(x, INT8_MAX)
    back = (tokens.float() - 128) * scale
    error = (back - x).abs().amax(dim=1)
    assert error[[0, 1, 3]].max().item() < 0.02
    assert error[2].item() > 1.0


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
def test_compiled_ops_equal_the_eager_ones() -> None:
    torch.manual_seed(0)
    product = quantize_weights(LinearWeights(torch.randn(48, 32), torch.randn(48)))
    plain, compiled = (
        Int8Linear(product, Int8Ops()),
        Int8Linear(product, compiled_int8_ops()),
    )
    for rows in (1, 2, 17):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x), plain(x), atol=0.05, rtol=0.01)


def test_smoothing_reduces_outliers_and_keeps_the_logits(new_artifact: NewArtifact) -> None:
    classifier = load_classifier(new_artifact("qwen3"))
    with torch.no_grad():
        for layer in classifier.backbone.layers:
            layer.input_layernorm.weight[3] *= 20
    texts = [[5, 9, 7, 30], [8, 8, 200, 31, 4, 90]]
    before = [classifier(torch.tensor([text])) for text in texts]
    largest = activation_maxima(classifier, texts)
    smooth(classifier, largest)
    after = [classifier(torch.tensor([text])) for text in texts]
    for old, new in zip(before, after, strict=True):
        for head in old:
            torch.testing.assert_close(new[head], old[head], atol=1e-4, rtol=1e-4)
    smoothed = activation_maxima(classifier, texts)
    for name in largest[0]:
        spread = [
            values[0][name].max() / values[0][name].median() for values in (largest, smoothed)
        ]
        assert spread[1] < spread[0]


@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_quantizing_records_how_the_int8_student_compares(
    new_artifact: NewArtifact, dataset: Path, family: str
) -> None:
    directory = new_artifact(family)
    record = quantize_student(directory, dataset, texts=60, threads=1)
    assert record == read_quantization_record(directory)
    assert {head.texts for head in record.heads.values()} == {60}
    # Random weights decide many texts narrowly, so a few may change; a broken path changes half.
    assert min(head.agreement for head in record.heads.values()) > 0.9
    assert record.passed == all(head.passed for head in record.heads.values())


@pytest.mark.parametrize("family", ["qwen3", "bert"])
def test_a_student_that_passed_its_gate_serves_in_8_bits_with_similar_logits(
    new_artifact: NewArtifact, dataset: Path, family: str
) -> None:
    directory = new_artifact(family)
    record_gate(directory, quantize_student(directory, dataset, texts=10, threads=1), passed=True)
    artifact = read_artifact(directory)
    engine = build_engine(artifact, SETTINGS)
    assert engine.kind == "packed-int8"
    plain = build_engine(artifact, SETTINGS.model_copy(update={"engine": EngineChoice.PACKED}))
    texts = [[5, 9, 7, 30], [8], [8, 8, 200, 31, 4, 90]]
    exact, given = plain.run(texts), engine.run(texts)
    for head, values in exact.items():
        assert np.abs(values - given[head]).mean() < 0.1 * np.abs(values).mean()


def test_a_student_that_failed_its_gate_does_not_serve_in_8_bits(
    new_artifact: NewArtifact, dataset: Path
) -> None:
    directory = new_artifact("qwen3")
    record_gate(directory, quantize_student(directory, dataset, texts=10, threads=1), passed=False)
    assert build_engine(read_artifact(directory), SETTINGS).kind == "packed-float32"


def test_a_student_that_passed_on_another_kind_of_cpu_does_not_serve_in_8_bits(
    new_artifact: NewArtifact, dataset: Path
) -> None:
    directory = new_artifact("qwen3")
    record = quantize_student(directory, dataset, texts=10, threads=1)
    assert record.largest_activation == activation_limit()
    [other] = {INT8_MAX, INT8_MAX_WITHOUT_VNNI} - {activation_limit()}
    elsewhere = record.model_copy(update={"largest_activation": other})
    record_gate(directory, elsewhere, passed=True)
    only_int8 = SETTINGS.model_copy(update={"engine": EngineChoice.PACKED_INT8})
    assert build_engine(read_artifact(directory), SETTINGS).kind == "packed-float32"
    with pytest.raises(ValueError, match="on a CPU that"):
        build_engine(read_artifact(directory), only_int8)


def record_gate(directory: Path, record: QuantizationRecord, *, passed: bool) -> None:
    heads = {
        name: head.model_copy(update={"passed": passed}) for name, head in record.heads.items()
    }
    write_quantization_record(
        directory, record.model_copy(update={"heads": heads, "passed": passed})
    )


def test_an_artifact_exported_again_is_not_served_from_old_weights(
    new_artifact: NewArtifact, dataset: Path
) -> None:
    directory = new_artifact("qwen3")
    record_gate(directory, quantize_student(directory, dataset, texts=10, threads=1), passed=True)
    (directory / MANIFEST).write_text((directory / MANIFEST).read_text() + " ")
    assert read_quantization_record(directory) is None
    assert build_engine(read_artifact(directory), SETTINGS).kind == "packed-float32"


def test_altered_int8_weights_are_not_served(new_artifact: NewArtifact, dataset: Path) -> None:
    directory = new_artifact("qwen3")
    record_gate(directory, quantize_student(directory, dataset, texts=10, threads=1), passed=True)
    weights = int8_weights_path(directory)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    only_int8 = SETTINGS.model_copy(update={"engine": EngineChoice.PACKED_INT8})
    with pytest.raises(ValueError, match="not those that passed"):
        build_engine(read_artifact(directory), only_int8)


def test_a_student_that_was_never_quantized_is_not_served_in_8_bits(
    new_artifact: NewArtifact,
) -> None:
    only_int8 = SETTINGS.model_copy(update={"engine": EngineChoice.PACKED_INT8})
    with pytest.raises(ValueError, match="not quantized"):
        build_engine(read_artifact(new_artifact("qwen3")), only_int8)


def test_a_student_that_transformers_runs_cannot_be_quantized(
    new_artifact: NewArtifact, dataset: Path
) -> None:
    with pytest.raises(ValueError, match="gpt2"):
        quantize_student(new_artifact("gpt2"), dataset, texts=10, threads=1)


TONE = Head(name="tone", labels=["bad", "good"])
TOPICS = Head(name="topics", type=HeadType.MULTI_LABEL, labels=["book", "food"])


def rows(head: Head, labels: NDArray[np.generic]) -> Rows:
    return Rows(["x"] * len(labels), np.arange(len(labels)), {head.name: labels})


def logits(positive: NDArray[np.generic]) -> FloatArray:
    return np.stack([np.zeros(len(positive)), np.where(positive, 1.0, -1.0)], axis=1)


@pytest.mark.parametrize(
    ("flips", "passed"), [(0, True), (1, True), (2, True), (3, False)], ids=str
)
def test_the_gate_requires_99_percent_agreement(flips: int, passed: bool) -> None:
    truth = np.arange(200) % 2
    before = truth.copy()
    before[:4] = 1 - before[:4]  # the float32 student is wrong on four texts
    after = before.copy()
    after[:flips] = truth[:flips]  # the int8 one corrects some: other answers, better figures
    [result] = compare_heads(
        [TONE],
        rows(TONE, truth),
        expected={"tone": logits(before)},
        actual={"tone": logits(after)},
        calibration={},
    ).values()
    assert result.agreement == pytest.approx(1 - flips / 200)
    assert result.passed is passed


def test_the_gate_allows_a_macro_f1_loss_of_three_tenths_of_a_point() -> None:
    truth = np.array([1] * 5 + [0] * 995)  # a rare class, where few changes have a large effect
    after = truth.copy()
    after[0] = 0
    [result] = compare_heads(
        [TONE],
        rows(TONE, truth),
        expected={"tone": logits(truth)},
        actual={"tone": logits(after)},
        calibration={},
    ).values()
    assert result.agreement == pytest.approx(0.999)
    assert result.macro_f1_float32 - result.macro_f1 > 0.003
    assert not result.passed


def test_the_gate_does_not_pass_without_labels() -> None:
    given = {"tone": logits(np.array([0, 1]))}
    missing = rows(TONE, np.array([-100, -100], np.int32))
    [result] = compare_heads([TONE], missing, expected=given, actual=given, calibration={}).values()
    assert not result.passed


def test_the_gate_counts_every_label_of_a_multi_label_head() -> None:
    labels = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    exact = np.where(labels > 0, 1.0, -1.0)
    given = exact.copy()
    given[0, 1] = 1.0
    [result] = compare_heads(
        [TOPICS],
        rows(TOPICS, labels),
        expected={"topics": exact},
        actual={"topics": given},
        calibration={},
    ).values()
    assert result.agreement == 0.75
    assert not result.passed


def test_the_gate_applies_the_fitted_thresholds() -> None:
    labels = np.array([[1.0, 0.0], [0.0, 1.0]], np.float32)
    exact = np.where(labels > 0, -1.0, -3.0)
    given = np.where(
        labels > 0, -2.2, -3.0
    )  # with the default threshold neither would predict a label
    low = Calibration(thresholds={"book": 0.15, "food": 0.15})
    [result] = compare_heads(
        [TOPICS],
        rows(TOPICS, labels),
        expected={"topics": exact},
        actual={"topics": given},
        calibration={"topics": low},
    ).values()
    assert (result.macro_f1_float32, result.macro_f1) == (1.0, 0.0)
    assert not result.passed
