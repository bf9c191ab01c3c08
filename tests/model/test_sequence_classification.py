from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from services.shared.datasets.card import Head
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.classifier import wrap_backbone
from services.shared.model.sequence_classification import (
    NotExpressible,
    head_parameter_name,
    sequence_classifier,
)

if TYPE_CHECKING:
    from tests.model.conftest import MakeClassifier

IDS = torch.tensor([[2, 9, 8, 7, 3], [2, 9, 3, 0, 0]])
MASK = (IDS != 0).long()


@pytest.mark.parametrize(
    "kind", ["qwen3", "llama", "bert", "xlm-roberta", "roberta", "modernbert", "distilbert"]
)
def test_the_classifier_of_transformers_gives_equal_logits(
    kind: str, make_classifier: MakeClassifier, heads: list[Head]
) -> None:
    classifier = make_classifier(kind)
    for head in heads:
        if not classifier.causal:
            torch.nn.init.normal_(classifier.heads.get_parameter(f"{head.name}.bias"))
        model = sequence_classifier(classifier, head)
        with torch.no_grad():
            found = model(input_ids=IDS, attention_mask=MASK).logits
            torch.testing.assert_close(found, classifier(IDS, MASK)[head.name])
        assert list(model.config.id2label.values()) == head.labels


def test_a_head_with_a_bias_is_not_expressible_as_a_decoder(
    make_classifier: MakeClassifier, heads: list[Head]
) -> None:
    classifier = make_classifier("qwen3")
    torch.nn.init.ones_(classifier.heads.get_parameter("sentiment.bias"))
    with pytest.raises(NotExpressible, match="has no bias"):
        sequence_classifier(classifier, heads[0])


def test_the_mean_is_pooled_where_the_classifier_of_transformers_does(
    make_classifier: MakeClassifier, heads: list[Head]
) -> None:
    backbones = {kind: make_classifier(kind).backbone for kind in ("modernbert", "bert")}
    mean = {
        kind: wrap_backbone(backbone, heads, pooling=Pooling.MEAN).eval()
        for kind, backbone in backbones.items()
    }
    model = sequence_classifier(mean["modernbert"], heads[0])
    with torch.no_grad():
        found = model(input_ids=IDS, attention_mask=MASK).logits
        torch.testing.assert_close(found, mean["modernbert"](IDS, MASK)[heads[0].name])
    with pytest.raises(NotExpressible, match=r"does not pool as this model does \(mean\)"):
        sequence_classifier(mean["bert"], heads[0])


def test_a_head_after_layers_that_are_not_linear_is_not_expressible(
    make_classifier: MakeClassifier, heads: list[Head]
) -> None:
    with pytest.raises(NotExpressible, match="not linear"):
        sequence_classifier(make_classifier("electra"), heads[0])


def test_more_labels_than_the_layers_before_a_head_can_carry_are_not_expressible(
    make_classifier: MakeClassifier,
) -> None:
    many = Head(name="many", labels=[f"label {n}" for n in range(16)])
    classifier = wrap_backbone(make_classifier("modernbert").backbone, [many])
    with pytest.raises(
        NotExpressible, match=r"16 labels do not fit .* hidden size of 32: at most 15"
    ):
        sequence_classifier(classifier, many)


def test_the_head_parameter_is_that_of_the_architecture(make_classifier: MakeClassifier) -> None:
    assert head_parameter_name(make_classifier("qwen3").config) == "score.weight"
    assert head_parameter_name(make_classifier("bert").config) == "classifier.weight"
