"""Reads and writes the sizes in a Hugging Face config.json, by each architecture's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.shared.memory.architecture import config_defaults
from services.shared.memory.architecture.dimensions import (
    BERT_LIKE,
    EXPERT_FAMILIES,
    LLAMA_LIKE,
    PHI_LIKE,
    Dimensions,
    Experts,
    Family,
    Latent,
)
from services.shared.memory.architecture.pooling import CONFIG_KEY, Pooling, config_pools_by_mean
from services.shared.memory.errors import InvalidInput

# Far beyond any published dense model: a larger number is a typing error.
_LARGEST = 10_000_000
# A plan walks every layer. The deepest published models have 126 (decoders) and 2 x 24 (T5).
_MOST_LAYERS = 1_000

_OTHER_NAMES = {
    "qwen2_5": "qwen2",
    "gemma3": "gemma3_text",
    # The text towers of vision-language models.
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_text": "qwen3",
}
ALIASES: dict[Family, dict[str, str]] = {
    Family.GPT2: {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    },
    Family.BLOOM: {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    Family.DISTILBERT: {
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
    },
    Family.OPT: {"intermediate_size": "ffn_dim"},
    Family.FALCON: {"intermediate_size": "ffn_hidden_size"},
    Family.T5: {
        "hidden_size": "d_model",
        "intermediate_size": "d_ff",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_heads",
        "head_dim": "d_kv",
    },
}
ALIASES[Family.GPT_BIGCODE] = ALIASES[Family.GPT2]

_WINDOW_SWITCHES = frozenset({Family.QWEN2, Family.QWEN3})
_GROUPED = LLAMA_LIKE | EXPERT_FAMILIES | PHI_LIKE
_POSITIONS = BERT_LIKE | {Family.GPT2, Family.GPT_BIGCODE, Family.OPT}
# transformers 5: these configs tie input and output embeddings by default.
_TIED = frozenset(
    {Family.GEMMA, Family.GEMMA2, Family.GEMMA3, Family.GPT2, Family.GPT_BIGCODE, Family.FALCON}
    | {Family.BLOOM, Family.OPT, Family.T5}
    | BERT_LIKE
    | {Family.MODERNBERT}
)


def dimensions_of(config: Mapping[str, Any]) -> Dimensions:
    """Return the dimensions that `config` describes.

    Optional keys have the defaults of transformers. Raises InvalidInput for an unknown `model_type`, for
    missing keys (all of them named) and for sizes that are not positive whole numbers.
    """
    family, config = _family(config)
    keys = _Keys(family, config)
    required = ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"]
    missing = [keys.name(key) for key in required if keys.get(key) is None]
    if missing:
        raise InvalidInput("model", f"the {family} config lacks {', '.join(missing)}")
    return _dimensions(family, keys)


def config_of(dims: Dimensions) -> dict[str, Any]:
    """Return a config with these dimensions, everything else left to the architecture's defaults.

    Raises InvalidInput where such a config would not have these dimensions.
    """
    family = dims.family
    config: dict[str, Any] = {
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "vocab_size": dims.vocab_size,
        "pad_token_id": 0,  # the default is that of the published vocabulary
        "tie_word_embeddings": dims.tied,
    }
    if family in LLAMA_LIKE or family in PHI_LIKE or family in EXPERT_FAMILIES:
        config |= {"num_key_value_heads": dims.num_kv_heads, "head_dim": dims.head_dim}
        config["sliding_window"] = dims.window
    if dims.experts:
        config |= _experts_config(family, dims.experts)
    if dims.latent:
        config |= _latent_config(dims.latent)
    if family is Family.FALCON:
        config |= _falcon_config(dims)
    if family in _WINDOW_SWITCHES:
        config["use_sliding_window"] = dims.window is not None
    biased = LLAMA_LIKE | EXPERT_FAMILIES | {Family.MODERNBERT, Family.GLM, Family.GLM4}
    if family is not Family.QWEN2 and family in biased:
        config["attention_bias"] = dims.attention_bias
    if family in (Family.LLAMA, Family.GRANITE, Family.MODERNBERT):
        config["mlp_bias"] = dims.mlp_bias
    if family is Family.OPT:
        config["word_embed_proj_dim"] = dims.hidden_size
    if dims.max_positions:
        config["max_position_embeddings"] = dims.max_positions
    if family in BERT_LIKE and dims.token_types:
        config["type_vocab_size"] = dims.token_types
    if dims.mean_pooling:
        config[CONFIG_KEY] = Pooling.MEAN.config_value
    aliases = ALIASES.get(family, {})
    written = {"model_type": str(family)}
    written |= {aliases.get(name, name): value for name, value in config.items()}
    if dimensions_of(written) != dims:
        raise InvalidInput("model", f"the sizes of this {family} model do not determine a config")
    return written


def _experts_config(family: Family, experts: Experts) -> dict[str, Any]:
    config: dict[str, Any] = {"num_experts_per_tok": experts.per_token}
    if family in (Family.MIXTRAL, Family.GPT_OSS):
        return config | {
            "num_local_experts": experts.num_experts,
            "intermediate_size": experts.intermediate_size,
        }
    config |= {"moe_intermediate_size": experts.intermediate_size}
    if family is Family.QWEN3_MOE:
        return config | {
            "num_experts": experts.num_experts,
            "norm_topk_prob": experts.normalised,
        }
    return config | {
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_experts,
        "first_k_dense_replace": experts.dense_layers,
        "n_group": experts.groups,
        "topk_group": 1,
        "norm_topk_prob": experts.normalised,
    }


def _latent_config(latent: Latent) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_value_rank,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": latent.nope_dim,
        "v_head_dim": latent.value_dim,
    }


def _falcon_config(dims: Dimensions) -> dict[str, Any]:
    grouped = dims.num_kv_heads > 1
    return {
        "new_decoder_architecture": grouped,
        "multi_query": not grouped,
        "num_kv_heads": dims.num_kv_heads,
        "num_ln_in_parallel_attn": dims.parallel_norms,
        "bias": dims.attention_bias,
        "alibi": False,
    }


class _Keys:
    """Reads a config by the key names that most architectures use."""

    def __init__(self, family: Family, config: Mapping[str, Any]) -> None:
        self._aliases = ALIASES.get(family, {})
        self.config = config

    def name(self, key: str) -> str:
        other = self._aliases.get(key, key)
        return other if other in self.config or key not in self.config else key

    def get(self, key: str, default: Any = None) -> Any:
        value = self.config.get(self.name(key))
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """Return a positive whole number. Raises InvalidInput naming the key."""
        return self._whole(key, default, smallest=1, largest=_LARGEST - 1)

    def layers(self, key: str, default: int | None = None) -> int:
        """Return a number of layers. Raises InvalidInput naming the key."""
        return self._whole(key, default, smallest=1, largest=_MOST_LAYERS)

    def count(self, key: str, default: int | None = None) -> int:
        """Return a whole number that may be 0. Raises InvalidInput naming the key."""
        return self._whole(key, default, smallest=0, largest=_LARGEST - 1)

    def _whole(self, key: str, default: int | None, *, smallest: int, largest: int) -> int:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            shown = repr(value)[:80]
        elif not smallest <= value <= largest:
            shown = str(value) if value.bit_length() <= 64 else "the number is too large"
        else:
            return value
        raise InvalidInput(
            f"model.{self.name(key)}",
            shown,
            accepted=f"a whole number from {smallest} to {largest}",
        )

    def flag(self, key: str, *, default: bool = False) -> bool:
        return bool(self.get(key, default))


def _family(config: Mapping[str, Any]) -> tuple[Family, Mapping[str, Any]]:
    nested = config.get("text_config")
    if isinstance(nested, Mapping) and "hidden_size" not in config:
        config = {"model_type": config.get("model_type"), **nested}
    named = config.get("model_type")
    known = [str(family) for family in Family]
    if not isinstance(named, str) or not named:
        raise InvalidInput("model.model_type", "the config lacks model_type", accepted=known)
    named = _OTHER_NAMES.get(named, named)
    if named not in known:
        raise InvalidInput(
            "model.model_type", f"unknown architecture {named[:80]!r}", accepted=known
        )
    return Family(named), config


def _dimensions(family: Family, keys: _Keys) -> Dimensions:
    h, heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    latent = _latent(keys) if family in (Family.DEEPSEEK_V2, Family.DEEPSEEK_V3) else None
    if keys.get("head_dim") is None and latent is None and h % heads:
        raise InvalidInput(
            "model.num_attention_heads", f"{heads} heads do not divide the hidden size {h}"
        )
    inner = config_defaults.inner_width(family, hidden_size=h)
    wide = 4 * h if family is Family.BLOOM else keys.size("intermediate_size", inner)
    experts = _experts(family, keys) if family in EXPERT_FAMILIES else None
    if family is Family.FALCON and (
        keys.flag("alibi") or not keys.flag("parallel_attn", default=True)
    ):
        raise InvalidInput(
            "model.alibi",
            "Falcon models with ALiBi or without parallel attention (falcon-rw) are not described",
        )
    qkv_bias, output_bias, mlp_bias = _biases(family, keys)
    return Dimensions(
        family=family,
        hidden_size=h,
        intermediate_size=wide,
        num_layers=keys.layers("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_kv_heads(family, keys, heads),
        head_dim=keys.size(
            "head_dim", config_defaults.head_dim(family, hidden_size=h, num_heads=heads)
        ),
        vocab_size=keys.size("vocab_size"),
        tied=keys.flag("tie_word_embeddings", default=family in _TIED),
        attention_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        max_positions=_positions(family, keys),
        token_types=_token_types(family, keys),
        decoder_layers=_decoder_layers(family, keys),
        gated=_gated(family, keys),
        parallel_norms=_parallel_norms(family, keys),
        dropout=_dropout(family, keys),
        window=_window(family, keys),
        experts=experts,
        latent=latent,
        mean_pooling=config_pools_by_mean(keys.config),
    )


def _kv_heads(family: Family, keys: _Keys, heads: int) -> int:
    if family in _GROUPED:
        default = config_defaults.key_value_heads(family, num_heads=heads)
        kv_heads = keys.size("num_key_value_heads", default)
        if heads % kv_heads:
            given = keys.get("num_key_value_heads") is not None
            whose = "" if given else f", the default of {family},"
            raise InvalidInput(
                "model.num_key_value_heads",
                f"{kv_heads}{whose} do not divide {heads} attention heads",
                accepted="" if given else f"{heads} where heads are not grouped",
            )
        return kv_heads
    if family is Family.GPT_BIGCODE:
        return 1 if keys.flag("multi_query", default=True) else heads
    if family is Family.FALCON:
        if keys.flag("new_decoder_architecture"):
            return keys.size("num_kv_heads", heads)
        return 1 if keys.flag("multi_query", default=True) else heads
    return heads


def _positions(family: Family, keys: _Keys) -> int:
    if family not in _POSITIONS:
        return 0
    return keys.size("max_position_embeddings", config_defaults.positions(family))


def _biases(family: Family, keys: _Keys) -> tuple[bool, bool, bool]:
    """Return whether the q/k/v, the output and the MLP projections have biases."""
    if family is Family.QWEN2:
        return True, False, False
    if family in (Family.LLAMA, Family.GRANITE):
        attention = keys.flag("attention_bias")
        return attention, attention, keys.flag("mlp_bias")
    if family in LLAMA_LIKE or family in EXPERT_FAMILIES:
        attention = keys.flag("attention_bias", default=family is Family.GPT_OSS)
        return attention, attention, False
    if family is Family.MODERNBERT:
        attention = keys.flag("attention_bias")
        return attention, attention, keys.flag("mlp_bias")
    if family is Family.FALCON:
        bias = keys.flag("bias")
        return bias, bias, bias
    if family is Family.GPT_NEOX:
        attention = keys.flag("attention_bias", default=True)
        return attention, attention, True
    if family is Family.OPT:
        bias = keys.flag("enable_bias", default=True)
        return bias, bias, bias
    if family in (Family.GLM, Family.GLM4):
        return keys.flag("attention_bias", default=True), False, False
    other = family not in (Family.T5, Family.PHI3)
    return other, other, other


def _token_types(family: Family, keys: _Keys) -> int:
    if family not in BERT_LIKE or family is Family.DISTILBERT:
        return 0
    return keys.size("type_vocab_size", 2)


def _decoder_layers(family: Family, keys: _Keys) -> int:
    if family is not Family.T5:
        return 0
    return keys.layers("num_decoder_layers", keys.layers("num_hidden_layers"))


def _gated(family: Family, keys: _Keys) -> bool:
    if family is Family.T5:
        return "gated" in str(keys.get("feed_forward_proj", "relu"))
    if family in PHI_LIKE or family is Family.MODERNBERT:
        return True
    return family in LLAMA_LIKE or family in EXPERT_FAMILIES


def _parallel_norms(family: Family, keys: _Keys) -> int:
    if family is not Family.FALCON:
        return 1
    # Falcon 2 sets num_ln_in_parallel_attn = 1 on the new decoder; left out, that decoder has two.
    default = 2 if keys.flag("new_decoder_architecture") else 1
    return keys.size("num_ln_in_parallel_attn", default)


def _dropout(family: Family, keys: _Keys) -> bool:
    named = {
        Family.BERT: "hidden_dropout_prob",
        Family.ROBERTA: "hidden_dropout_prob",
        Family.XLM_ROBERTA: "hidden_dropout_prob",
        Family.DISTILBERT: "dropout",
        Family.GPT2: "resid_pdrop",
        Family.GPT_BIGCODE: "resid_pdrop",
        Family.OPT: "dropout",
        Family.T5: "dropout_rate",
    }.get(family)
    if named is None:
        return False
    rate = keys.get(named, 0.1)
    if isinstance(rate, bool) or not isinstance(rate, (int, float)):
        raise InvalidInput(f"model.{named}", f"{str(rate)[:80]!r} is not a number")
    return rate > 0


def _window(family: Family, keys: _Keys) -> int | None:
    default = None if "sliding_window" in keys.config else config_defaults.window(family)
    window = keys.get("sliding_window", default)
    if not isinstance(window, int) or isinstance(window, bool):
        return None
    return window if keys.flag("use_sliding_window", default=True) else None


def _experts(family: Family, keys: _Keys) -> Experts:
    if family is Family.MIXTRAL:
        return Experts(
            keys.size("num_local_experts", 8),
            keys.size("intermediate_size", config_defaults.inner_width(family, hidden_size=0)),
            per_token=keys.size("num_experts_per_tok", 2),
            normalised=True,
        )
    if family is Family.GPT_OSS:
        return Experts(
            keys.size("num_local_experts", 128),
            keys.size("intermediate_size", config_defaults.inner_width(family, hidden_size=0)),
            per_token=keys.size("num_experts_per_tok", 4),
        )
    if family is Family.QWEN3_MOE:
        # transformers 5 writes num_local_experts; published files say num_experts.
        count = keys.size("num_experts", keys.size("num_local_experts", 128))
        return Experts(
            count,
            keys.size("moe_intermediate_size", 768),
            per_token=keys.size("num_experts_per_tok", 8),
            normalised=keys.flag("norm_topk_prob"),
        )
    # V2's class has no defaults for most of these, V3's has those of the published model.
    third = family is Family.DEEPSEEK_V3
    return Experts(
        num_experts=keys.size("n_routed_experts", 256 if third else None),
        intermediate_size=keys.size("moe_intermediate_size", 2048 if third else None),
        per_token=keys.size("num_experts_per_tok", 8 if third else None),
        normalised=third and keys.flag("norm_topk_prob", default=True),
        groups=keys.size("n_group", 8 if third else 1),
        shared_experts=keys.count("n_shared_experts", 1 if third else 0),
        dense_layers=keys.count("first_k_dense_replace", 3 if third else 0),
    )


def _latent(keys: _Keys) -> Latent:
    # null means that queries have no low rank; left out, transformers' classes take 1536.
    unranked = keys.config.get("q_lora_rank", 0) is None
    return Latent(
        query_rank=None if unranked else keys.size("q_lora_rank", 1536),
        key_value_rank=keys.size("kv_lora_rank", 512),
        rope_dim=keys.size("qk_rope_head_dim", 64),
        nope_dim=keys.size("qk_nope_head_dim", 128),
        value_dim=keys.size("v_head_dim", 128),
    )
