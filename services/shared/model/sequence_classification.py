"""A head of ours as a `...ForSequenceClassification` model of transformers, with equal logits."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from services.shared.datasets.card import Head
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.classifier import Classifier
from services.shared.model.description import classification_fields

# tanh(e x) / e equals x within float32 rounding while |x| < 28: its relative error is (e x)^2 / 3. A power
# of two scales without rounding.
TANH_SCALE = 2.0**-16


class NotExpressible(ValueError):
    """No architecture of transformers computes these logits."""


def head_parameter_name(config: PreTrainedConfig) -> str | None:
    """Return the first parameter that the architecture's sequence classifier adds to its backbone."""
    factory: Any = AutoModelForSequenceClassification
    try:
        with torch.device("meta"):
            model = factory.from_config(copy.deepcopy(config))
    except ValueError:  # the architecture has none
        return None
    prefix = f"{model.base_model_prefix}."
    return next((n for n, _ in model.named_parameters() if not n.startswith(prefix)), None)


@torch.no_grad()
def sequence_classifier(classifier: Classifier, head: Head) -> Any:
    """Return a transformers model in float32 whose logits are those of one head.

    Raises NotExpressible where no architecture computes them.
    """
    config = copy.deepcopy(classifier.config)
    fields = classification_fields(head)
    config.id2label = {int(index): label for index, label in fields["id2label"].items()}
    config.label2id = fields["label2id"]
    config.problem_type = fields["problem_type"]
    factory: Any = AutoModelForSequenceClassification
    try:
        model = factory.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise NotExpressible(f"transformers has no classifier for {config.model_type}") from error
    linear: Any = classifier.heads[head.name]
    weight, bias = linear.weight.float(), linear.bias.float()
    _fill(model, classifier, weight, bias)
    backbone = {name: value.float() for name, value in classifier.backbone.state_dict().items()}
    missing = model.base_model.load_state_dict(backbone, strict=False).missing_keys
    if any(not name.startswith("pooler.") for name in missing):
        raise NotExpressible(f"{config.model_type}: its classifier has another backbone")
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    return model.eval()


def _fill(model: Any, classifier: Classifier, weight: Tensor, bias: Tensor) -> None:
    """Set the head's parameters."""
    name = type(model).__name__
    score, output = getattr(model, "score", None), getattr(model, "classifier", None)
    pooler = getattr(model.base_model, "pooler", None)
    if classifier.pooling is Pooling.LAST and isinstance(score, nn.Linear) and score.bias is None:
        if bias.any():
            raise NotExpressible(
                f"{name} has no bias, and the head's bias is not zero (up to {bias.abs().max():.3g}): its "
                "logits cannot be equal"
            )
        score.weight.copy_(weight)
    elif classifier.pooling is not Pooling.FIRST:
        raise NotExpressible(f"{name} does not pool as this model does ({classifier.pooling})")
    elif isinstance(output, nn.Linear) and isinstance(getattr(pooler, "activation", None), nn.Tanh):
        assert pooler is not None
        _scaled_identity(pooler.dense)
        output.weight.copy_(weight / TANH_SCALE)
        output.bias.copy_(bias)
    elif type(output).__name__ in {"RobertaClassificationHead", "XLMRobertaClassificationHead"}:
        assert output is not None
        _scaled_identity(output.dense)
        output.out_proj.weight.copy_(weight / TANH_SCALE)
        output.out_proj.bias.copy_(bias)
    else:
        raise NotExpressible(f"{name} puts layers before its head that are not linear")


def _scaled_identity(dense: nn.Linear) -> None:
    dense.weight.copy_(torch.eye(dense.in_features) * TANH_SCALE)
    dense.bias.zero_()
