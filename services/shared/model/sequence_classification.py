"""A head of ours as a `...ForSequenceClassification` model of transformers, with equal logits.

Encoders put layers before their classifier, which ours have not. They are made to pass logits through:

    BERT, RoBERTa, XLM-R   a dense layer and tanh: the identity times 2^-16, where tanh is linear
    DistilBERT             a dense layer and ReLU: the logits and their negatives, whose difference is taken
    ModernBERT             a dense layer and a layer norm, whose mean and variance constants fix: the logits
                           times 2^-16 and their negatives among them
"""

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

# tanh(e x) / e equals x within float32 rounding while |x| < 28: its relative error is (e x)^2 / 3. Beside
# constants of 1, e x changes a variance by (e x)^2. A power of two scales without rounding.
SCALE = 2.0**-16


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
    config = _config(classifier, head)
    factory: Any = AutoModelForSequenceClassification
    try:
        model = factory.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise NotExpressible(f"transformers has no classifier for {config.model_type}") from error
    linear: Any = classifier.heads[head.name]
    _fill(model, classifier.pooling, linear.weight.float(), linear.bias.float())
    backbone = {name: value.float() for name, value in classifier.backbone.state_dict().items()}
    missing = model.base_model.load_state_dict(backbone, strict=False).missing_keys
    if any(not name.startswith("pooler.") for name in missing):
        raise NotExpressible(f"{config.model_type}: its classifier has another backbone")
    model.config.architectures = [type(model).__name__]
    model.config.dtype = torch.float32
    return model.eval()


def _config(classifier: Classifier, head: Head) -> Any:
    config: Any = copy.deepcopy(classifier.config)
    fields = classification_fields(head)
    config.id2label = {int(index): label for index, label in fields["id2label"].items()}
    config.label2id = fields["label2id"]
    config.problem_type = fields["problem_type"]
    if config.model_type == "modernbert":
        config.classifier_pooling = classifier.pooling.config_value
        config.classifier_activation, config.classifier_bias = "linear", True
    return config


def _fill(model: Any, pooling: Pooling, weight: Tensor, bias: Tensor) -> None:
    """Set the parameters that the architecture adds. Raises NotExpressible."""
    name = type(model).__name__
    if pooling is Pooling.LAST:
        _fill_decoder(model, weight, bias)
    elif name == "ModernBertForSequenceClassification":
        _fill_norm_head(model, weight, bias)
    elif pooling is not Pooling.FIRST:
        raise NotExpressible(f"{name} does not pool as this model does ({pooling})")
    elif name == "DistilBertForSequenceClassification":
        _fill_pairs(model.pre_classifier, weight, bias)
        _read_pairs(model.classifier, 1.0)
    elif name in ("RobertaForSequenceClassification", "XLMRobertaForSequenceClassification"):
        _fill_tanh_head(model.classifier.dense, model.classifier.out_proj, weight, bias)
    elif name == "BertForSequenceClassification":
        _fill_tanh_head(model.bert.pooler.dense, model.classifier, weight, bias)
    else:
        raise NotExpressible(f"{name} puts layers before its head that are not linear")


def _fill_decoder(model: Any, weight: Tensor, bias: Tensor) -> None:
    score = getattr(model, "score", None)
    if not isinstance(score, nn.Linear) or score.bias is not None:
        raise NotExpressible(f"{type(model).__name__} has no linear `score` without bias")
    if bias.any():
        raise NotExpressible(
            f"{type(model).__name__} has no bias, and this model, trained by a former version, has one (up "
            f"to {bias.abs().max():.3g}): its logits cannot be equal"
        )
    score.weight.copy_(weight)


def _fill_tanh_head(dense: nn.Linear, output: nn.Linear, weight: Tensor, bias: Tensor) -> None:
    dense.weight.copy_(torch.eye(dense.in_features) * SCALE)
    dense.bias.zero_()
    output.weight.copy_(weight / SCALE)
    output.bias.copy_(bias)


def _fill_norm_head(model: Any, weight: Tensor, bias: Tensor) -> None:
    dense, norm = model.head.dense, model.head.norm
    width, classes = dense.out_features, len(weight)
    _fill_pairs(dense, weight * SCALE, bias * SCALE, room=2)
    constants = (width - 2 * classes) // 2 * 2
    dense.bias[2 * classes : 2 * classes + constants : 2] = 1.0
    dense.bias[2 * classes + 1 : 2 * classes + constants : 2] = -1.0
    norm.weight.fill_(1.0)
    if norm.bias is not None:
        norm.bias.zero_()
    deviation = (constants / width + norm.eps) ** 0.5
    _read_pairs(model.classifier, deviation / SCALE / 2)  # ReLU passes one of two, the norm both


def _fill_pairs(dense: nn.Linear, weight: Tensor, bias: Tensor, *, room: int = 0) -> None:
    """Let output 2k be the logit of class k, output 2k + 1 its negative, and the others 0."""
    if 2 * len(weight) + room > dense.out_features:
        raise NotExpressible(
            f"{len(weight)} labels do not fit into a hidden size of {dense.out_features}: at most "
            f"{(dense.out_features - room) // 2} do"
        )
    dense.weight.zero_()
    dense.bias.zero_()
    for k, sign in ((0, 1.0), (1, -1.0)):
        dense.weight[k : 2 * len(weight) : 2] = sign * weight
        dense.bias[k : 2 * len(weight) : 2] = sign * bias


def _read_pairs(output: nn.Linear, scale: float) -> None:
    """Let class k be `scale` times the difference of inputs 2k and 2k + 1."""
    output.weight.zero_()
    output.bias.zero_()
    rows = torch.arange(output.out_features)
    output.weight[rows, 2 * rows] = scale
    output.weight[rows, 2 * rows + 1] = -scale
