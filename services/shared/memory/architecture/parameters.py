"""Parameter tensors of every family, with the names and shapes that transformers gives them."""

from __future__ import annotations

from enum import Enum
from math import prod
from typing import NamedTuple

from services.shared.memory.architecture.dimensions import BERT_LIKE, PHI_LIKE, Dimensions, Family


class UnitKind(str, Enum):
    """The part of a model that a group of tensors belongs to."""

    EMBEDDING = "embedding"
    LAYER = "layer"
    NORM = "norm"
    HEADS = "heads"
    LANGUAGE_HEAD = "language_head"

    __str__ = str.__str__


class Tensor(NamedTuple):
    """One parameter; its name is relative to the unit it belongs to."""

    name: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of values."""
        return prod(self.shape)


class Unit(NamedTuple):
    """The parameters of one part of the model: a layer, the embedding, the heads."""

    kind: UnitKind
    name: str
    tensors: tuple[Tensor, ...]

    @property
    def elements(self) -> int:
        """Number of values of all tensors."""
        return sum(tensor.elements for tensor in self.tensors)


def layer_units(dims: Dimensions) -> tuple[Unit, ...]:
    """Return the transformer layers in order; equal layers share their tensors."""
    prefix = _LAYER_PREFIX.get(dims.family, "layers")
    if dims.family is Family.T5:
        sides = (("encoder", dims.num_layers), ("decoder", dims.decoder_layers))
        return tuple(
            Unit(UnitKind.LAYER, f"{side}.block.{index}", _t5_block(dims, side, index))
            for side, count in sides
            for index in range(count)
        )
    kinds = {first: _layer_tensors(dims, first) for first in _kind_starts(dims)}
    units = []
    tensors: tuple[Tensor, ...] = ()
    for index in range(dims.num_layers):
        tensors = kinds.get(index, tensors)
        units.append(Unit(UnitKind.LAYER, f"{prefix}.{index}", tensors))
    return tuple(units)


def embedding_unit(dims: Dimensions) -> Unit:
    """Return everything before the first layer."""
    h, name = dims.hidden_size, _EMBEDDING_NAME.get(dims.family, "embed_tokens")
    tensors = [Tensor(f"{name}.weight", (dims.vocab_size, h))]
    if dims.family in BERT_LIKE:
        tensors.append(Tensor("embeddings.position_embeddings.weight", (dims.max_positions, h)))
        if dims.token_types:
            tensors.append(Tensor("embeddings.token_type_embeddings.weight", (dims.token_types, h)))
        tensors += _norm("embeddings.LayerNorm", h)
    elif dims.family is Family.MODERNBERT:
        tensors.append(Tensor("embeddings.norm.weight", (h,)))
    elif dims.family in (Family.GPT2, Family.GPT_BIGCODE):
        tensors.append(Tensor("wpe.weight", (dims.max_positions, h)))
    elif dims.family is Family.OPT:
        tensors.append(Tensor("decoder.embed_positions.weight", (dims.max_positions + 2, h)))
    elif dims.family is Family.BLOOM:
        tensors += _norm("word_embeddings_layernorm", h)
    return Unit(UnitKind.EMBEDDING, "embedding", tuple(tensors))


def norm_unit(dims: Dimensions) -> Unit:
    """Return everything between the last layer and the heads: final norm, or BERT's pooler."""
    h = dims.hidden_size
    tensors: list[Tensor] = []
    if dims.family in (Family.BERT, Family.ROBERTA, Family.XLM_ROBERTA):
        tensors += _linear("pooler.dense", h, h, bias=True)
    elif dims.family is Family.MODERNBERT:
        tensors.append(Tensor("final_norm.weight", (h,)))
    elif dims.family is Family.T5:
        tensors.append(Tensor("encoder.final_layer_norm.weight", (h,)))
        tensors.append(Tensor("decoder.final_layer_norm.weight", (h,)))
    elif dims.family in _FINAL_LAYER_NORM:
        tensors += _norm(_FINAL_LAYER_NORM[dims.family], h)
    elif dims.family is not Family.DISTILBERT:
        tensors.append(Tensor("norm.weight", (h,)))
    return Unit(UnitKind.NORM, "norm", tuple(tensors))


def heads_unit(dims: Dimensions, heads: tuple[int, ...]) -> Unit:
    """Return the classifier's linear heads, one weight and one bias each."""
    tensors = [
        tensor
        for index, classes in enumerate(heads)
        for tensor in _linear(f"heads.{index}", classes, dims.hidden_size, bias=True)
    ]
    return Unit(UnitKind.HEADS, "heads", tuple(tensors))


def language_head_unit(dims: Dimensions) -> Unit:
    """Return the output projection of a causal language model; empty where it is tied."""
    weight = Tensor("lm_head.weight", (dims.vocab_size, dims.hidden_size))
    return Unit(UnitKind.LANGUAGE_HEAD, "lm_head", () if dims.tied else (weight,))


_LAYER_PREFIX = {
    Family.BERT: "encoder.layer",
    Family.ROBERTA: "encoder.layer",
    Family.XLM_ROBERTA: "encoder.layer",
    Family.DISTILBERT: "transformer.layer",
    Family.GPT2: "h",
    Family.GPT_BIGCODE: "h",
    Family.FALCON: "h",
    Family.BLOOM: "h",
    Family.OPT: "decoder.layers",
}
_EMBEDDING_NAME = {
    Family.BERT: "embeddings.word_embeddings",
    Family.ROBERTA: "embeddings.word_embeddings",
    Family.XLM_ROBERTA: "embeddings.word_embeddings",
    Family.DISTILBERT: "embeddings.word_embeddings",
    Family.MODERNBERT: "embeddings.tok_embeddings",
    Family.GPT2: "wte",
    Family.GPT_BIGCODE: "wte",
    Family.GPT_NEOX: "embed_in",
    Family.FALCON: "word_embeddings",
    Family.BLOOM: "word_embeddings",
    Family.OPT: "decoder.embed_tokens",
    Family.T5: "shared",
}
_FINAL_LAYER_NORM = {
    Family.GPT2: "ln_f",
    Family.GPT_BIGCODE: "ln_f",
    Family.GPT_NEOX: "final_layer_norm",
    Family.FALCON: "ln_f",
    Family.BLOOM: "ln_f",
    Family.OPT: "decoder.final_layer_norm",
}


def _kind_starts(dims: Dimensions) -> tuple[int, ...]:
    """Return the indices at which the layers' tensors change."""
    if dims.family is Family.MODERNBERT:
        return (0, 1)
    if dims.experts and dims.experts.dense_layers:
        return (0, dims.experts.dense_layers)
    return (0,)


def _layer_tensors(dims: Dimensions, index: int) -> tuple[Tensor, ...]:
    if dims.family in BERT_LIKE:
        return _bert_layer(dims)
    if dims.family is Family.MODERNBERT:
        return _modernbert_layer(dims, first=index == 0)
    if dims.family in (Family.GPT2, Family.GPT_BIGCODE):
        return _gpt2_layer(dims)
    if dims.family is Family.OPT:
        return _opt_layer(dims)
    if dims.family in (Family.GPT_NEOX, Family.FALCON, Family.BLOOM):
        return _fused_attention_layer(dims)
    return _llama_layer(dims, index)


def _llama_layer(dims: Dimensions, index: int) -> tuple[Tensor, ...]:
    h, norms = dims.hidden_size, ["input_layernorm", "post_attention_layernorm"]
    if dims.family in (Family.GEMMA2, Family.GEMMA3):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if dims.family is Family.GLM4:
        norms += ["post_self_attn_layernorm", "post_mlp_layernorm"]
    attention = _latent_attention(dims) if dims.latent else _grouped_attention(dims)
    if dims.experts and index >= dims.experts.dense_layers:
        mlp = _expert_mlp(dims)
    else:
        mlp = _gated_mlp(dims, "mlp", dims.intermediate_size)
    return (*attention, *mlp, *(Tensor(f"{name}.weight", (h,)) for name in norms))


def _grouped_attention(dims: Dimensions) -> list[Tensor]:
    h, q, kv, at = dims.hidden_size, dims.query_size, dims.key_value_size, "self_attn"
    bias = dims.attention_bias
    if dims.family is Family.PHI3:
        tensors = _linear(f"{at}.qkv_proj", q + 2 * kv, h, bias=bias)
    else:
        tensors = _linear(f"{at}.q_proj", q, h, bias=bias)
        tensors += _linear(f"{at}.k_proj", kv, h, bias=bias)
        tensors += _linear(f"{at}.v_proj", kv, h, bias=bias)
    tensors += _linear(f"{at}.o_proj", h, q, bias=dims.output_bias)
    if dims.family is Family.GPT_OSS:
        tensors.insert(0, Tensor(f"{at}.sinks", (dims.num_heads,)))
    if dims.qk_norm:
        tensors += [
            Tensor(f"{at}.{name}.weight", (dims.head_dim,)) for name in ("q_norm", "k_norm")
        ]
    return tensors


def _latent_attention(dims: Dimensions) -> list[Tensor]:
    latent, h, at, bias = dims.latent, dims.hidden_size, "self_attn", dims.attention_bias
    assert latent is not None
    q = dims.num_heads * (latent.nope_dim + latent.rope_dim)
    if latent.query_rank is None:
        tensors = _linear(f"{at}.q_proj", q, h)
    else:
        tensors = _linear(f"{at}.q_a_proj", latent.query_rank, h, bias=bias)
        tensors.append(Tensor(f"{at}.q_a_layernorm.weight", (latent.query_rank,)))
        tensors += _linear(f"{at}.q_b_proj", q, latent.query_rank)
    rank, wide = latent.key_value_rank, dims.num_heads * (latent.nope_dim + latent.value_dim)
    tensors += _linear(f"{at}.kv_a_proj_with_mqa", rank + latent.rope_dim, h, bias=bias)
    tensors.append(Tensor(f"{at}.kv_a_layernorm.weight", (rank,)))
    tensors += _linear(f"{at}.kv_b_proj", wide, rank)
    return tensors + _linear(f"{at}.o_proj", h, dims.num_heads * latent.value_dim, bias=bias)


def _gated_mlp(dims: Dimensions, name: str, width: int) -> list[Tensor]:
    h, bias = dims.hidden_size, dims.mlp_bias
    if dims.family in PHI_LIKE:
        tensors = _linear(f"{name}.gate_up_proj", 2 * width, h)
    else:
        tensors = _linear(f"{name}.gate_proj", width, h, bias=bias)
        tensors += _linear(f"{name}.up_proj", width, h, bias=bias)
    return tensors + _linear(f"{name}.down_proj", h, width, bias=bias)


def _expert_mlp(dims: Dimensions) -> list[Tensor]:
    experts, h = dims.experts, dims.hidden_size
    assert experts is not None
    count, width = experts.num_experts, experts.intermediate_size
    if dims.family is Family.GPT_OSS:
        return [
            *_linear("mlp.router", count, h, bias=True),
            Tensor("mlp.experts.gate_up_proj", (count, h, 2 * width)),
            Tensor("mlp.experts.gate_up_proj_bias", (count, 2 * width)),
            Tensor("mlp.experts.down_proj", (count, width, h)),
            Tensor("mlp.experts.down_proj_bias", (count, h)),
        ]
    tensors = [
        Tensor("mlp.gate.weight", (count, h)),
        Tensor("mlp.experts.gate_up_proj", (count, 2 * width, h)),
        Tensor("mlp.experts.down_proj", (count, h, width)),
    ]
    if experts.shared_experts:
        tensors += _gated_mlp(dims, "mlp.shared_experts", width * experts.shared_experts)
    return tensors


def _bert_layer(dims: Dimensions) -> tuple[Tensor, ...]:
    h, wide = dims.hidden_size, dims.intermediate_size
    if dims.family is Family.DISTILBERT:
        names = [f"attention.{name}_lin" for name in "qkv"]
        output, first, second = "attention.out_lin", "ffn.lin1", "ffn.lin2"
        norms = ("sa_layer_norm", "output_layer_norm")
    else:
        names = [f"attention.self.{name}" for name in ("query", "key", "value")]
        output, first, second = "attention.output.dense", "intermediate.dense", "output.dense"
        norms = ("attention.output.LayerNorm", "output.LayerNorm")
    tensors = [tensor for name in names for tensor in _linear(name, h, h, bias=True)]
    tensors += _linear(output, h, h, bias=True) + _norm(norms[0], h)
    tensors += _linear(first, wide, h, bias=True) + _linear(second, h, wide, bias=True)
    return (*tensors, *_norm(norms[1], h))


def _modernbert_layer(dims: Dimensions, *, first: bool) -> tuple[Tensor, ...]:
    h, wide = dims.hidden_size, dims.intermediate_size
    # The first layer's norm is an identity: the embedding already ends in one.
    tensors = [] if first else [Tensor("attn_norm.weight", (h,))]
    tensors += _linear("attn.Wqkv", 3 * h, h, bias=dims.attention_bias)
    tensors += _linear("attn.Wo", h, h, bias=dims.output_bias)
    tensors.append(Tensor("mlp_norm.weight", (h,)))
    tensors += _linear("mlp.Wi", 2 * wide, h, bias=dims.mlp_bias)
    return (*tensors, *_linear("mlp.Wo", h, wide, bias=dims.mlp_bias))


def _gpt2_layer(dims: Dimensions) -> tuple[Tensor, ...]:
    h, wide, qkv = dims.hidden_size, dims.intermediate_size, _fused_width(dims)
    # GPT-2 stores its weights as (in, out): a convolution of width one, not a linear layer.
    swap = dims.family is Family.GPT2
    tensors = _norm("ln_1", h) + _linear("attn.c_attn", qkv, h, bias=True, swap=swap)
    tensors += _linear("attn.c_proj", h, h, bias=True, swap=swap) + _norm("ln_2", h)
    tensors += _linear("mlp.c_fc", wide, h, bias=True, swap=swap)
    return (*tensors, *_linear("mlp.c_proj", h, wide, bias=True, swap=swap))


def _opt_layer(dims: Dimensions) -> tuple[Tensor, ...]:
    h, wide, bias = dims.hidden_size, dims.intermediate_size, dims.attention_bias
    names = ("k_proj", "v_proj", "q_proj", "out_proj")
    tensors = [t for name in names for t in _linear(f"self_attn.{name}", h, h, bias=bias)]
    tensors += _norm("self_attn_layer_norm", h)
    tensors += _linear("fc1", wide, h, bias=bias) + _linear("fc2", h, wide, bias=bias)
    return (*tensors, *_norm("final_layer_norm", h))


def _fused_attention_layer(dims: Dimensions) -> tuple[Tensor, ...]:
    """GPT-NeoX, Falcon and BLOOM: one projection for q, k and v, and an MLP without a gate."""
    h, wide = dims.hidden_size, dims.intermediate_size
    at = "attention" if dims.family is Family.GPT_NEOX else "self_attention"
    tensors = _linear(f"{at}.query_key_value", _fused_width(dims), h, bias=dims.attention_bias)
    tensors += _linear(f"{at}.dense", h, h, bias=dims.output_bias)
    tensors += _linear("mlp.dense_h_to_4h", wide, h, bias=dims.mlp_bias)
    tensors += _linear("mlp.dense_4h_to_h", h, wide, bias=dims.mlp_bias)
    if dims.family is not Family.FALCON:
        names = ["input_layernorm", "post_attention_layernorm"]
    elif dims.parallel_norms == 2:
        names = ["ln_attn", "ln_mlp"]
    else:
        names = ["input_layernorm"]
    return (*tensors, *(tensor for name in names for tensor in _norm(name, h)))


def _t5_block(dims: Dimensions, side: str, index: int) -> tuple[Tensor, ...]:
    h, at = dims.hidden_size, "layer.0.SelfAttention"
    tensors = _t5_attention(dims, at)
    if index == 0:
        # 32 buckets of relative distance: T5Config.relative_attention_num_buckets.
        tensors.append(Tensor(f"{at}.relative_attention_bias.weight", (32, dims.num_heads)))
    tensors.append(Tensor("layer.0.layer_norm.weight", (h,)))
    if side == "decoder":
        tensors += _t5_attention(dims, "layer.1.EncDecAttention")
        tensors.append(Tensor("layer.1.layer_norm.weight", (h,)))
    last = "layer.2" if side == "decoder" else "layer.1"
    names = ("wi_0", "wi_1") if dims.gated else ("wi",)
    for name in names:
        tensors += _linear(f"{last}.DenseReluDense.{name}", dims.intermediate_size, h)
    tensors += _linear(f"{last}.DenseReluDense.wo", h, dims.intermediate_size)
    return (*tensors, Tensor(f"{last}.layer_norm.weight", (h,)))


def _t5_attention(dims: Dimensions, at: str) -> list[Tensor]:
    h, q = dims.hidden_size, dims.query_size
    tensors = [tensor for name in "qkv" for tensor in _linear(f"{at}.{name}", q, h)]
    return tensors + _linear(f"{at}.o", h, q)


def _fused_width(dims: Dimensions) -> int:
    return dims.query_size + 2 * dims.key_value_size


def _linear(
    name: str, outputs: int, inputs: int, *, bias: bool = False, swap: bool = False
) -> list[Tensor]:
    shape = (inputs, outputs) if swap else (outputs, inputs)
    tensors = [Tensor(f"{name}.weight", shape)]
    if bias:
        tensors.append(Tensor(f"{name}.bias", (outputs,)))
    return tensors


def _norm(name: str, width: int) -> list[Tensor]:
    return [Tensor(f"{name}.weight", (width,)), Tensor(f"{name}.bias", (width,))]
