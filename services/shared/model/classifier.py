"""The classifier: a transformer backbone, pooled hidden states, and one linear head per label set.

Legend: B texts, S tokens, H hidden size, C classes of a head, K tapped layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_MAPPING, AutoConfig, AutoModel, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
)

from services.shared.datasets.card import Head
from services.shared.memory.architecture.pooling import CONFIG_KEY, Pooling, config_pools_by_mean

TAPPED = "@hidden"  # key of the tapped states in the result of forward; not a valid head name


class Classifier(nn.Module):
    """A backbone without language-model head, and linear heads on its pooled hidden states."""

    def __init__(self, backbone: Any, heads: Sequence[Head]) -> None:
        super().__init__()
        self.backbone = backbone
        self.pooling = pooling_of(backbone.config)
        self.causal = is_causal(backbone.config)
        # Of BERT and its like; RoBERTa has one type, decoders have none.
        self.has_token_types = (getattr(backbone.config, "type_vocab_size", None) or 0) > 1
        self.head_specs = tuple(heads)
        reserved = [head.name for head in heads if hasattr(nn.ModuleDict(), head.name)]
        if reserved:  # heads are attributes of a torch module, which reserves some names
            raise ValueError(f"a head cannot be named {', '.join(reserved)}: rename its column")
        embedded = backbone.get_input_embeddings().weight
        self.heads = nn.ModuleDict(
            {
                head.name: nn.Linear(
                    hidden_size(backbone.config),
                    len(head.labels),
                    dtype=embedded.dtype,
                    device=embedded.device,
                )
                for head in heads
            }
        )
        # By layer number, to the width of the teacher; only during distillation.
        self.projections = nn.ModuleDict()

    def add_projections(self, layers: Sequence[int], width: int) -> None:
        """Add learned linear projections of some layers' tapped states to `width`; never exported."""
        first = next(iter(self.heads.values())).weight
        for layer in layers:
            self.projections[str(layer)] = nn.Linear(
                hidden_size(self.config), width, dtype=first.dtype, device=first.device
            )

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        tap: Sequence[int] = (),
    ) -> dict[str, Tensor]:
        """Return float32 logits [B, C] by head name, for right-padded `input_ids` [B, S].

        `attention_mask` [B, S] is None where no text is padded, `token_type_ids` [B, S] where all are 0; a
        backbone without token types ignores them. `tap` names layers (0 is the
        embedding, the number of layers the final state) whose pooled states come back as
        `TAPPED` [B, K, H], projected where the layer has a projection.
        """
        # With causal attention no token attends to the padding on its right, so a decoder needs no mask:
        # without one, the fast causal kernel is used and no [B, 1, S, S] mask is materialised.
        output = self.backbone(
            input_ids=input_ids,
            attention_mask=None if self.causal else attention_mask,
            use_cache=False,
            output_hidden_states=bool(tap),
            **({"token_type_ids": token_type_ids} if self.has_token_types else {}),
        )
        pooled = self._pool(output.last_hidden_state, attention_mask)
        result = {name: head(pooled).float() for name, head in self.heads.items()}
        if tap:
            states = [
                self._project(layer, self._pool(output.hidden_states[layer], attention_mask))
                for layer in tap
            ]
            result[TAPPED] = torch.stack(states, dim=1).float()
        return result

    def _project(self, layer: int, state: Tensor) -> Tensor:
        name = str(layer)
        return self.projections[name](state) if name in self.projections else state

    def _pool(self, states: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Reduce the states of each text to one: [B, S, H] -> [B, H]."""
        if self.pooling is Pooling.FIRST:
            return states[:, 0]
        if self.pooling is Pooling.MEAN:
            return mean_of_real_tokens(states, attention_mask)
        if attention_mask is None:
            return states[:, -1]
        last = attention_mask.sum(dim=1) - 1
        return states[torch.arange(states.shape[0], device=states.device), last]

    def gradient_checkpointing_enable(self) -> None:
        """Recompute each layer's activations in the backward pass."""
        # Renamed in transformers 5.2x; the earlier default was the re-entrant implementation.
        renamed = getattr(self.backbone, "activation_checkpointing_enable", None)
        if renamed is not None:
            renamed({"use_reentrant": False})
        else:
            self.backbone.gradient_checkpointing_enable({"use_reentrant": False})

    @property
    def config(self) -> PretrainedConfig:
        """Return the backbone's configuration."""
        config: PretrainedConfig = self.backbone.config
        return config


def mean_of_real_tokens(states: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return the mean state of each text without its padding, summed in float32: [B, S, H] -> [B, H]."""
    if attention_mask is None:
        return states.mean(dim=1, dtype=torch.float32).to(states.dtype)
    mask = attention_mask.unsqueeze(-1)  # [B, S, 1]
    # Not multiplied: what an architecture computes for padding may be NaN.
    real = states.masked_fill(mask == 0, 0.0)
    return (real.sum(dim=1, dtype=torch.float32) / mask.sum(dim=1)).to(states.dtype)


def is_causal(config: PretrainedConfig) -> bool:
    """Return whether attention is causal. Raises ValueError for architectures that are not supported.

    transformers lists an architecture for causal language modelling, masked language modelling or
    both; BERT and its variants are listed for both and are decoders only with `is_decoder`.
    """
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(
            f"{kind} is an encoder-decoder; a classifier needs a decoder (Qwen3, Llama ...) "
            "or an encoder (BERT, XLM-R, ModernBERT ...)"
        )
    if getattr(config, "use_bidirectional_attention", False):
        return False
    if kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        return bool(getattr(config, "is_decoder", False))
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return True
    raise ValueError(f"{kind} is neither a text decoder nor a text encoder known to transformers")


def pooling_of(config: PretrainedConfig) -> Pooling:
    """Return the pooling of a model of this configuration."""
    if config_pools_by_mean({CONFIG_KEY: getattr(config, CONFIG_KEY, None)}):
        return Pooling.MEAN
    return Pooling.LAST if is_causal(config) else Pooling.FIRST


def set_pooling(config: PretrainedConfig, pooling: Pooling | None) -> None:
    """Record a pooling in a configuration; None keeps its own. Raises ValueError where it has none such."""
    own = Pooling.LAST if is_causal(config) else Pooling.FIRST
    if pooling is None:
        pooling = pooling_of(config)
    if pooling not in (own, Pooling.MEAN):
        raise ValueError(
            f"{config.model_type} cannot be pooled at its {pooling} token; pooling is {own} or mean"
        )
    setattr(config, CONFIG_KEY, pooling.config_value)


def hidden_size(config: PretrainedConfig) -> int:
    """Return the width of the final hidden state. Raises ValueError where the config has none."""
    size = getattr(config, "hidden_size", None)
    if not isinstance(size, int):
        raise ValueError(f"{config.model_type}: config.json has no hidden_size; not a text model?")
    return size


def build_config(
    mapping: Mapping[str, Any], *, vocab_size: int, pad_token_id: int
) -> PretrainedConfig:
    """Return the transformers configuration that a spec describes, for a given tokenizer.

    Raises ValueError for an unknown architecture or field.
    """
    fields = dict(mapping)
    kind = fields.pop("model_type")
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"config.model_type: transformers knows no architecture {kind!r}")
    known = set(CONFIG_MAPPING[kind]().to_dict())
    unknown = sorted(set(fields) - known)
    if unknown:
        raise ValueError(f"config: {kind} has no field {', '.join(unknown)}")
    if fields.get("vocab_size", vocab_size) < vocab_size:
        raise ValueError(
            f"config.vocab_size {fields['vocab_size']} is smaller than the tokenizer's {vocab_size}"
        )
    fields = {"vocab_size": vocab_size, "pad_token_id": pad_token_id} | fields
    # The defaults of an architecture refer to special tokens of its published vocabulary.
    for name in {"bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"} & known:
        fields.setdefault(name, None)
    config = AutoConfig.for_model(kind, **fields)
    is_causal(config)
    queries, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if keys and queries % keys:
        raise ValueError(
            f"config: num_attention_heads {queries} is not a multiple of num_key_value_heads {keys}"
        )
    return config


def build_classifier(
    config: PretrainedConfig,
    heads: Sequence[Head],
    *,
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
) -> Classifier:
    """Return an untrained classifier, initialised by torch's generator or empty under `device("meta")`.

    Architectures without fused attention in transformers (BLOOM, GPT-OSS) get their own instead of
    "sdpa". Raises ValueError for an architecture that is neither decoder nor encoder.
    """
    is_causal(config)
    factory: Any = AutoModel
    backbone = factory.from_config(
        config, attn_implementation=supported_attention(config, attention), dtype=dtype
    )
    return wrap_backbone(backbone, heads)


def supported_attention(config: PretrainedConfig, attention: str) -> str:
    """Return the implementation to ask transformers for: "eager" where it has no fused one for "sdpa"."""
    fused = getattr(MODEL_MAPPING[type(config)], "_supports_sdpa", True)
    return attention if fused or attention != "sdpa" else "eager"


def wrap_backbone(
    backbone: Any, heads: Sequence[Head], *, pooling: Pooling | None = None
) -> Classifier:
    """Return a classifier around a loaded backbone, without its own pooling layer.

    `pooling` None is that of its configuration. Raises ValueError where it cannot be pooled so.
    """
    # BERT's pooler would get no gradient, and data-parallel wrappers reject unused parameters.
    if getattr(backbone, "pooler", None) is not None:
        backbone.pooler = None
    backbone.config.use_cache = False
    set_pooling(backbone.config, pooling)
    return Classifier(backbone, heads)


def initial_heads(classifier: Classifier, seed: int) -> dict[str, Tensor]:
    """Return the initial weights of the heads, the same on every rank, as `<head>.weight|bias`."""
    generator = torch.Generator().manual_seed(seed)
    std = float(getattr(classifier.config, "initializer_range", 0.02) or 0.02)
    width = hidden_size(classifier.config)
    state = {}
    for head in classifier.head_specs:
        weight = torch.empty(len(head.labels), width)
        state[f"{head.name}.weight"] = weight.normal_(std=std, generator=generator)
        state[f"{head.name}.bias"] = torch.zeros(len(head.labels))
    return state


def initial_projections(classifier: Classifier, seed: int) -> dict[str, Tensor]:
    """Return the initial, norm-preserving weights of the projections, as `<layer>.weight|bias`."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer, linear in classifier.projections.items():
        assert isinstance(linear, nn.Linear)
        weight = torch.empty(linear.out_features, linear.in_features)
        state[f"{layer}.weight"] = weight.normal_(std=linear.in_features**-0.5, generator=generator)
        state[f"{layer}.bias"] = torch.zeros(linear.out_features)
    return state


@torch.no_grad()
def initialise_heads(classifier: Classifier, seed: int) -> None:
    """Set the heads of a whole (unsharded, not meta) classifier to their initial weights."""
    for name, value in initial_heads(classifier, seed).items():
        classifier.heads.get_parameter(name).copy_(value)


def transformer_layers(classifier: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks in order: the units of sharding and checkpointing.

    Raises ValueError where no list of `num_hidden_layers` modules is found.
    """
    backbone: Any = classifier.backbone if isinstance(classifier, Classifier) else classifier
    num_layers = backbone.config.num_hidden_layers
    for module in backbone.modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return list(module)
    raise ValueError(f"{type(backbone).__name__} has no list of {num_layers} layers to shard")


def embedding(classifier: Classifier) -> nn.Module:
    """Return the token embedding."""
    module: nn.Module = classifier.backbone.get_input_embeddings()
    return module
