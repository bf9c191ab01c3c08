from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from services.shared.datasets.card import Head
from services.shared.datasets.upload import HeadColumn, Layout
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.classifier import (
    TAPPED,
    build_classifier,
    build_config,
    embedding,
    initial_heads,
    initial_projections,
    initialise_heads,
    is_causal,
    mean_of_real_tokens,
    pooling_of,
    set_pooling,
    transformer_layers,
    wrap_backbone,
)
from services.shared.model.tokens import pad

if TYPE_CHECKING:
    from tests.model.conftest import MakeClassifier

SHORT, LONG = [5, 6, 7], [5, 6, 7, 8, 9, 10, 11]
DECODERS = ["qwen3", "qwen2", "llama", "mistral"]
ENCODERS = ["bert", "xlm-roberta", "modernbert"]


@pytest.mark.parametrize("kind", DECODERS + ENCODERS)
def test_padding_does_not_change_the_logits_of_a_text(
    kind: str, make_classifier: MakeClassifier
) -> None:
    classifier = make_classifier(kind)
    ids, mask, _ = pad([SHORT, LONG], 0)
    with torch.no_grad():
        together = classifier(ids, mask)
        alone = classifier(torch.tensor([SHORT]))
    for head in together:
        torch.testing.assert_close(together[head][0], alone[head][0], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", DECODERS)
def test_a_decoder_is_read_at_its_last_real_token(
    kind: str, make_classifier: MakeClassifier
) -> None:
    classifier = make_classifier(kind)
    with torch.no_grad():
        before = classifier(torch.tensor([LONG]))["sentiment"]
        after = classifier(torch.tensor([[*LONG[:-1], 12]]))["sentiment"]
    assert classifier.pooling is Pooling.LAST
    assert not torch.allclose(before, after)


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_is_read_at_its_first_token(kind: str, make_classifier: MakeClassifier) -> None:
    classifier = make_classifier(kind)
    ids = torch.tensor([LONG])
    with torch.no_grad():
        states = classifier.backbone(input_ids=ids).last_hidden_state[:, 0]
        expected = classifier.heads["sentiment"](states)
        found = classifier(ids)["sentiment"]
    assert classifier.pooling is Pooling.FIRST
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert", "qwen3"])
def test_mean_pooling_is_that_of_sentence_transformers(
    kind: str, make_classifier: MakeClassifier
) -> None:
    classifier = wrap_backbone(
        make_classifier(kind).backbone,
        [Head(name="mood", labels=["a", "b"])],
        pooling=Pooling.MEAN,
    ).eval()
    ids, mask, _ = pad([SHORT, LONG, [9]], pad_id=0)
    assert mask is not None
    with torch.no_grad():
        own_mask = None if kind == "qwen3" else mask
        output = classifier.backbone(input_ids=ids, attention_mask=own_mask)
        states = output.last_hidden_state
        # sentence_transformers 5.1, models/Pooling.py, pooling_mode_mean_tokens.
        expanded = mask.unsqueeze(-1).expand(states.size()).to(states.dtype)
        summed = torch.sum(states * expanded, 1)
        mean = summed / torch.clamp(expanded.sum(1), min=1e-9)
        expected = classifier.heads["mood"](mean)
        torch.testing.assert_close(classifier(ids, mask)["mood"], expected)
        for row, text in enumerate((SHORT, LONG, [9])):
            alone = classifier(torch.tensor([text]))["mood"]
            torch.testing.assert_close(alone[0], expected[row], atol=1e-5, rtol=1e-5)
    assert classifier.config.classifier_pooling == "mean"


def test_a_mean_ignores_what_padding_holds_and_sums_in_float32() -> None:
    states = torch.ones(1, 4001, 2, dtype=torch.bfloat16)
    states[:, -1] = float("nan")
    mask = torch.ones(1, 4001, dtype=torch.int64)
    mask[:, -1] = 0
    # In bfloat16 a sum of ones ends at 256.
    assert mean_of_real_tokens(states, mask).tolist() == [[1.0, 1.0]]
    assert mean_of_real_tokens(states[:, :-1], None).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(("kind", "pooling"), [("bert", Pooling.LAST), ("qwen3", Pooling.FIRST)])
def test_a_token_that_does_not_read_the_text_is_refused(
    kind: str, pooling: Pooling, make_classifier: MakeClassifier
) -> None:
    with pytest.raises(ValueError, match=f"cannot be pooled at its {pooling} token"):
        set_pooling(make_classifier(kind).config, pooling)


def test_a_decoder_never_gets_an_attention_mask(make_classifier: MakeClassifier) -> None:
    classifier = make_classifier("qwen3")
    masks: list[torch.Tensor | None] = []
    classifier.backbone.register_forward_pre_hook(
        lambda _module, _args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    classifier(*pad([SHORT, LONG], 0))
    assert masks == [None]


def test_logits_are_float32_even_from_a_bfloat16_backbone(heads: list[Head]) -> None:
    config = build_config(
        {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 1, "head_dim": 8},
        vocab_size=50,
        pad_token_id=0,
    )
    classifier = build_classifier(config, heads, dtype=torch.bfloat16)
    assert classifier.heads.get_parameter("sentiment.weight").dtype is torch.bfloat16
    assert classifier(torch.tensor([SHORT]))["sentiment"].dtype is torch.float32


@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_every_parameter_gets_a_gradient_with_activation_checkpointing(
    kind: str, make_classifier: MakeClassifier
) -> None:
    classifier = make_classifier(kind).train()
    classifier.gradient_checkpointing_enable()
    logits = classifier(*pad([SHORT, LONG], 0))
    torch.autograd.backward([value.square().sum() for value in logits.values()])
    assert [name for name, p in classifier.named_parameters() if p.grad is None] == []


def test_tapped_states_are_those_of_the_named_layers(make_classifier: MakeClassifier) -> None:
    classifier = make_classifier("qwen3")
    ids = torch.tensor([LONG])
    with torch.no_grad():
        tapped = classifier(ids, tap=(0, 2))[TAPPED]
        embedded = embedding(classifier)(ids)[:, -1]
        final = classifier.backbone(input_ids=ids).last_hidden_state[:, -1]
    torch.testing.assert_close(tapped[:, 0], embedded)
    torch.testing.assert_close(tapped[:, 1], final)


def test_projections_map_tapped_states_and_leave_the_logits_unchanged(
    make_classifier: MakeClassifier,
) -> None:
    classifier = make_classifier("qwen3")
    ids = torch.tensor([LONG])
    with torch.no_grad():
        plain = classifier(ids, tap=(1, 2))
        classifier.add_projections([2], width=48)
        assert initial_projections(classifier, 0).keys() == {"2.weight", "2.bias"}
        classifier.projections.get_parameter("2.weight").fill_(0)
        classifier.projections.get_parameter("2.bias").fill_(3)
        found = classifier(ids, tap=(2,))
    assert (found[TAPPED] == 3).all()
    assert found[TAPPED].shape == (1, 1, 48)
    torch.testing.assert_close(found["topics"], plain["topics"])


def test_initial_projections_depend_on_the_seed_alone(make_classifier: MakeClassifier) -> None:
    classifier = make_classifier("qwen3")
    classifier.add_projections([1, 2], width=48)
    one, same, other = (initial_projections(classifier, seed) for seed in (1, 1, 2))
    assert torch.equal(one["1.weight"], same["1.weight"])
    assert not torch.equal(one["1.weight"], other["1.weight"])
    assert not torch.equal(one["1.weight"], one["2.weight"])


@pytest.mark.parametrize("kind", [*DECODERS, *ENCODERS])
def test_the_layers_to_shard_are_found_in_any_architecture(
    kind: str, make_classifier: MakeClassifier
) -> None:
    assert len(transformer_layers(make_classifier(kind))) == 2


def test_a_classifier_is_built_empty_on_the_meta_device(heads: list[Head]) -> None:
    config = build_config({"model_type": "qwen3"}, vocab_size=320, pad_token_id=0)
    with torch.device("meta"):
        classifier = build_classifier(config, heads)
    assert {p.device.type for p in classifier.parameters()} == {"meta"}
    first = initial_heads(classifier, 3)
    assert first["sentiment.weight"].shape == (2, config.hidden_size)


def test_initial_heads_depend_on_the_seed_alone(make_classifier: MakeClassifier) -> None:
    one, other = make_classifier("qwen3", seed=1), make_classifier("qwen3", seed=2)
    assert not torch.equal(
        one.heads.get_parameter("topics.weight"), other.heads.get_parameter("topics.weight")
    )
    initialise_heads(other, 1)
    assert torch.equal(
        one.heads.get_parameter("topics.weight"), other.heads.get_parameter("topics.weight")
    )


def test_an_encoder_decoder_is_refused_with_the_supported_kinds() -> None:
    with pytest.raises(ValueError, match=r"t5 is an encoder-decoder; .*Qwen3"):
        build_config({"model_type": "t5"}, vocab_size=320, pad_token_id=0)


def test_a_model_that_reads_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="vit is neither a text decoder nor a text encoder"):
        build_config({"model_type": "vit"}, vocab_size=320, pad_token_id=0)


def test_bert_as_a_decoder_is_read_as_one() -> None:
    config = build_config({"model_type": "bert", "is_decoder": True}, vocab_size=9, pad_token_id=0)
    assert is_causal(config)
    assert pooling_of(config) is Pooling.LAST


def test_an_unknown_field_of_the_architecture_is_named() -> None:
    with pytest.raises(ValueError, match="qwen3 has no field hidden_sise"):
        build_config({"model_type": "qwen3", "hidden_sise": 8}, vocab_size=9, pad_token_id=0)


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ValueError, match="transformers knows no architecture 'qwen33'"):
        build_config({"model_type": "qwen33"}, vocab_size=9, pad_token_id=0)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused() -> None:
    with pytest.raises(ValueError, match="vocab_size 100 is smaller than the tokenizer's 320"):
        build_config({"model_type": "qwen3", "vocab_size": 100}, vocab_size=320, pad_token_id=0)


def test_query_heads_that_key_heads_do_not_divide_are_refused() -> None:
    fields = {"model_type": "qwen3", "num_attention_heads": 4}
    with pytest.raises(ValueError, match="4 is not a multiple of num_key_value_heads 32"):
        build_config(fields, vocab_size=9, pad_token_id=0)


def test_a_head_name_reserved_by_torch_is_refused() -> None:
    config = build_config({"model_type": "qwen3"}, vocab_size=9, pad_token_id=0)
    heads = [Head(name="type", labels=["a", "b"])]
    with torch.device("meta"), pytest.raises(ValueError, match="cannot be named type"):
        build_classifier(config, heads)


def test_every_name_reserved_by_torch_is_refused_when_a_dataset_is_uploaded() -> None:
    reserved = {name for name in dir(nn.ModuleDict()) if not name.startswith("_")}
    for name in sorted(reserved):
        with pytest.raises(ValueError, match="cannot name a head"):
            Layout(heads=[HeadColumn(name=name)])
