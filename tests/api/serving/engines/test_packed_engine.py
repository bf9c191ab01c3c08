"""The packed engine compared with the forward pass of transformers, by family."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from services.api.serving.engines.packed_batch import pack
from services.api.serving.engines.packed_engine import (
    PackedEngine,
    take_backbone,
    unsupported_reason,
)
from services.api.serving.engines.packed_weights import take_heads
from services.api.serving.engines.padded_engine import PaddedEngine
from services.api.serving.prediction import FloatArray
from services.api.serving.rollout.model_loader import build_engine
from services.api.serving.settings import EngineChoice, ServingSettings
from services.shared.datasets.card import Head
from services.shared.model.artifact import read_artifact
from services.shared.model.classifier import Classifier, build_classifier
from tests.api.serving.artifacts import NewArtifact

MAX_LENGTH = 70
VOCABULARY = 200
HEADS = [Head(name="tone", labels=["bad", "good"]), Head(name="genre", labels=list("abcde"))]
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "pad_token_id": 0,
}
MEAN: dict[str, object] = {"classifier_pooling": "mean"}
# Short enough that local layers see less than the whole text; the last of five layers is a local one.
MODERNBERT: dict[str, object] = {"local_attention": 16, "num_hidden_layers": 5}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0}
FAMILIES: dict[str, tuple[str, dict[str, object]]] = {
    "qwen3": ("qwen3", {"num_key_value_heads": 2, "head_dim": 24}),
    "qwen3-attention-bias": (
        "qwen3",
        {"num_key_value_heads": 4, "head_dim": 16, "attention_bias": True},
    ),
    "qwen2": ("qwen2", {"num_key_value_heads": 1}),
    "llama": ("llama", {"num_key_value_heads": 4}),
    "llama-3": ("llama", {"num_key_value_heads": 2, "rope_parameters": LLAMA3}),
    "llama-mlp-bias": ("llama", {"num_key_value_heads": 2, "mlp_bias": True}),
    "bert": ("bert", {}),
    "bert-mean": ("bert", MEAN),
    "bert-tanh": ("bert", MEAN | {"hidden_act": "gelu_new"}),
    "bert-relu": ("bert", {"hidden_act": "relu", "num_hidden_layers": 1}),
    "roberta": ("roberta", {}),
    "xlm-roberta": ("xlm-roberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    "xlm-roberta-mean": ("xlm-roberta", MEAN | {"pad_token_id": 1}),
    "modernbert": ("modernbert", MODERNBERT),
    "modernbert-mean": ("modernbert", MODERNBERT | MEAN),
    "modernbert-biases": (
        "modernbert",
        MODERNBERT | {"attention_bias": True, "mlp_bias": True, "norm_bias": True},
    ),
    "one-layer": ("qwen3", {"num_key_value_heads": 2, "head_dim": 16, "num_hidden_layers": 1}),
}


def classifier_of(name: str, dtype: torch.dtype = torch.float32) -> Classifier:
    family, options = FAMILIES[name]
    positions = {"max_position_embeddings": MAX_LENGTH + 2} if is_encoder(name) else {}
    config = AutoConfig.for_model(family, **{**SHAPE, **positions, **options})
    torch.manual_seed(7)
    classifier = build_classifier(config, HEADS).eval()
    for path, parameter in classifier.named_parameters():
        # Spread enough that every part of the network matters, norms and biases included. An encoder's last
        # norm would carry a common bias straight to the heads.
        centre = float(path.endswith("orm.weight")) if is_encoder(name) else 0.5
        torch.nn.init.normal_(parameter, mean=0.0 if parameter.dim() == 2 else centre, std=0.2)
    return classifier.to(dtype)


def is_encoder(name: str) -> bool:
    return FAMILIES[name][0] in {"bert", "roberta", "xlm-roberta", "modernbert"}


def texts_of(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(0, VOCABULARY, length).tolist() for length in lengths]


def plain(classifier: Classifier, texts: list[list[int]]) -> dict[str, FloatArray]:
    with torch.inference_mode():
        answers = [classifier(torch.tensor([text])) for text in texts]
    return {h.name: torch.cat([a[h.name] for a in answers]).numpy() for h in HEADS}


def packed(classifier: Classifier) -> PackedEngine:
    heads = take_heads(classifier)
    return PackedEngine(take_backbone(classifier, max_length=MAX_LENGTH), heads)


@pytest.fixture(scope="module")
def pair() -> tuple[Classifier, PackedEngine]:
    return classifier_of("qwen3"), packed(classifier_of("qwen3"))


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_of_mixed_lengths_get_the_logits_of_transformers(name: str) -> None:
    texts = texts_of([1, 5, MAX_LENGTH, 5, 2, 33, 1, 5, 17])
    expected = plain(classifier_of(name), texts)
    answers = packed(classifier_of(name)).run(texts)
    for head in HEADS:
        np.testing.assert_allclose(answers[head.name], expected[head.name], atol=1e-4)
        assert np.ptp(expected[head.name], axis=0).min() > 0.1, "the texts must differ"


@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [MAX_LENGTH], [MAX_LENGTH] * 3, [9]])
def test_the_shortest_and_the_longest_texts_are_correct(
    lengths: list[int], pair: tuple[Classifier, PackedEngine]
) -> None:
    texts = texts_of(lengths)
    expected, answers = plain(pair[0], texts), pair[1].run(texts)
    for head in HEADS:
        np.testing.assert_allclose(answers[head.name], expected[head.name], atol=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, MAX_LENGTH), min_size=1, max_size=12), st.integers(0, 99))
def test_the_answer_to_a_text_does_not_depend_on_its_batch(
    pair: tuple[Classifier, PackedEngine], lengths: list[int], seed: int
) -> None:
    texts = texts_of(lengths, seed)
    together = pair[1].run(texts)
    for index, text in enumerate(texts):
        alone = pair[1].run([text])
        for head in HEADS:
            np.testing.assert_allclose(together[head.name][index], alone[head.name][0], atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3", "qwen2", "llama-3", "bert-mean", "modernbert"])
def test_bfloat16_decides_like_transformers_in_bfloat16(name: str) -> None:
    texts = texts_of(np.random.default_rng(3).integers(1, MAX_LENGTH, 300).tolist(), seed=4)
    expected = plain(classifier_of(name, torch.bfloat16), texts)
    answers = packed(classifier_of(name, torch.bfloat16)).run(texts)
    for head in HEADS:
        same = answers[head.name].argmax(-1) == expected[head.name].argmax(-1)
        assert same.mean() >= 0.99


@pytest.mark.parametrize("name", [name for name in FAMILIES if is_encoder(name)])
def test_an_encoder_answers_like_the_padded_engine(name: str) -> None:
    texts = texts_of(np.random.default_rng(5).integers(1, MAX_LENGTH + 1, 40).tolist(), seed=6)
    expected = PaddedEngine(classifier_of(name), batch_tokens=512).run(texts)
    answers = packed(classifier_of(name)).run(texts)
    for head in HEADS:
        np.testing.assert_allclose(answers[head.name], expected[head.name], atol=1e-4)


def test_the_second_text_of_a_pair_has_its_own_token_type() -> None:
    pair = [5, 6, 7, ~8, ~9]
    with torch.inference_mode():
        ids, types = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0, 0, 0, 1, 1]])
        expected = classifier_of("bert-mean")(ids, None, types)
        other = classifier_of("bert-mean")(ids)
    answers = packed(classifier_of("bert-mean")).run([[3, 4], pair])
    for head in HEADS:
        np.testing.assert_allclose(answers[head.name][1], expected[head.name][0], atol=1e-4)
        assert (expected[head.name] - other[head.name]).abs().max() > 0.01


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30))
def test_packing_keeps_every_token_in_its_place(lengths: list[int]) -> None:
    texts = [
        [index * 10 + place for place in range(length)] for index, length in enumerate(lengths)
    ]
    batch = pack(texts)
    ends = (batch.last + 1).tolist()
    starts = [0, *ends[:-1]]
    for place, (start, end) in enumerate(zip(starts, ends, strict=True)):
        assert batch.tokens[start:end].tolist() == texts[batch.order[place]]
        assert batch.positions[start:end].tolist() == list(range(end - start))
    covered = [start + n for start, count, length in batch.groups for n in range(count * length)]
    assert covered == list(range(sum(lengths)))


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gpt2", {}, "gpt2"),
        ("qwen3", {"classifier_pooling": "mean"}, "mean"),
        ("bert", {"hidden_act": "gelu_10"}, "gelu_10"),
        ("xlm-roberta", {"max_position_embeddings": MAX_LENGTH}, "positions for 69 tokens"),
        ("modernbert", {"rope_parameters": {"full_attention": YARN}}, "yarn"),
        ("qwen3", {"hidden_act": "gelu"}, "gelu"),
        ("llama", {"rope_parameters": {**LLAMA3, "rope_type": "dynamic"}}, "dynamic"),
        (
            "qwen3",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0},
            "sliding",
        ),
    ],
)
def test_other_backbones_are_not_supported(
    family: str, options: dict[str, object], reason: str
) -> None:
    config = AutoConfig.for_model(family, **{**SHAPE, **options})
    assert reason in str(unsupported_reason(config, max_length=MAX_LENGTH))


def test_a_sliding_window_longer_than_every_text_is_supported() -> None:
    options = {"use_sliding_window": True, "sliding_window": MAX_LENGTH, "max_window_layers": 0}
    config = AutoConfig.for_model("qwen3", **{**SHAPE, **options})
    assert unsupported_reason(config, max_length=MAX_LENGTH) is None


def test_packing_consumes_the_classifier_instead_of_doubling_memory() -> None:
    classifier = classifier_of("qwen3")
    packed(classifier)
    left = sum(p.numel() for name, p in classifier.named_parameters() if "proj" in name)
    assert left == 0


def test_a_decoder_may_be_run_by_transformers_if_configured(
    new_artifact: NewArtifact,
) -> None:
    artifact = read_artifact(new_artifact("qwen3"))
    engine = build_engine(artifact, ServingSettings(engine=EngineChoice.TRANSFORMERS))
    assert engine.kind.startswith("transformers-")


def test_an_engine_that_cannot_run_the_backbone_is_refused_with_its_name(
    new_artifact: NewArtifact,
) -> None:
    artifact = read_artifact(new_artifact("gpt2"))
    with pytest.raises(ValueError, match="packed cannot run"):
        build_engine(artifact, ServingSettings(engine=EngineChoice.PACKED))
