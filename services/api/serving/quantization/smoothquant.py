"""SmoothQuant: migrates activation outliers into the weights before both are quantized.

After SmoothQuant (Xiao et al. 2022, arXiv:2211.10438): channel j of a linear's input is divided by
s_j = max|x_j|^a / max|w_j|^(1-a), and column j of its weight multiplied by it. The division is folded
into the weights that produce the input (of a norm or a previous linear), so that it is free at inference
and changes nothing in exact arithmetic.

Legend: I input width of a linear, A query heads, K key and value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from services.shared.model.classifier import Classifier, transformer_layers
from services.shared.model.tokens import pad

# a in the formula: the paper's default, and the better of {0, 0.5} on our stress model.
MIGRATION_STRENGTH = 0.5
_SMALLEST = 1e-5

# One linear of each group that reads the same input.
_OBSERVED = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@torch.inference_mode()
def activation_maxima(
    classifier: Classifier, texts: Sequence[Sequence[int]]
) -> list[dict[str, Tensor]]:
    """Run texts one by one and return each layer's channel maxima [I] by observed linear."""
    layers = transformer_layers(classifier)
    seen: list[dict[str, Tensor]] = [{} for _ in layers]
    hooks = [
        layer.get_submodule(name).register_forward_pre_hook(_observe(seen[index], name))
        for index, layer in enumerate(layers)
        for name in _OBSERVED
    ]
    try:
        for text in texts:
            classifier(*pad([text], 0))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.no_grad()
def smooth(classifier: Classifier, maxima: Sequence[dict[str, Tensor]]) -> None:
    """Fold the smoothing into a classifier's weights, in place; its logits do not change."""
    for layer, seen in zip(transformer_layers(classifier), maxima, strict=True):
        block: Any = layer
        attention, mlp = block.self_attn, block.mlp
        _fold_into_norm(
            block.input_layernorm,
            [attention.q_proj, attention.k_proj, attention.v_proj],
            seen["self_attn.q_proj"],
        )
        _fold_into_norm(
            block.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj], seen["mlp.gate_proj"]
        )
        factors = _factors(seen["mlp.down_proj"], [mlp.down_proj])
        _divide_rows(mlp.up_proj, factors)
        mlp.down_proj.weight.mul_(factors)
        _fold_into_values(attention, seen["self_attn.o_proj"])


def _observe(seen: dict[str, Tensor], name: str) -> Any:
    def hook(module: nn.Module, inputs: tuple[Tensor]) -> None:  # noqa: ARG001
        largest = inputs[0].abs().flatten(0, -2).amax(dim=0)
        seen[name] = torch.maximum(seen[name], largest) if name in seen else largest

    return hook


def _factors(activations: Tensor, linears: Sequence[nn.Linear]) -> Tensor:
    """Return s [I] for linears that read the same input."""
    weights = torch.stack([linear.weight.abs().amax(dim=0) for linear in linears]).amax(dim=0)
    factors = activations.clamp_min(_SMALLEST) ** MIGRATION_STRENGTH / weights.clamp_min(
        _SMALLEST
    ) ** (1 - MIGRATION_STRENGTH)
    return factors.clamp_min(_SMALLEST)


def _fold_into_norm(norm: Any, linears: Sequence[nn.Linear], activations: Tensor) -> None:
    factors = _factors(activations, linears)
    norm.weight.div_(factors)
    for linear in linears:
        linear.weight.mul_(factors)


def _fold_into_values(attention: Any, activations: Tensor) -> None:
    """Fold the smoothing of o_proj into v_proj, each of whose heads is shared by several query heads."""
    head_dim = attention.head_dim
    kv_heads = attention.v_proj.out_features // head_dim
    factors = _factors(activations, [attention.o_proj])
    grouped = factors.view(kv_heads, -1, head_dim)  # [K, A / K, D]
    shared = grouped.amax(dim=1, keepdim=True)
    _divide_rows(attention.v_proj, shared.flatten())
    attention.o_proj.weight.mul_(shared.expand_as(grouped).flatten())


def _divide_rows(linear: nn.Linear, factors: Tensor) -> None:
    linear.weight.div_(factors[:, None])
    if linear.bias is not None:
        linear.bias.div_(factors)
