"""Writing a model's dimensions as a transformers config: the reverse of `config_keys`."""

from __future__ import annotations

from typing import Any

from services.shared.memory.config_keys import ALIASES, dimensions_of
from services.shared.memory.dimensions import BERT_LIKE, LLAMA_LIKE, Dimensions, Family
from services.shared.memory.errors import InvalidInput


def config_of(dims: Dimensions) -> dict[str, Any]:
    """Return a config with these dimensions, everything else left to the architecture's defaults.

    Raises InvalidInput where a config of the sizes alone would not say all of them.
    """
    family = dims.family
    config: dict[str, Any] = {
        "hidden_size": dims.hidden_size,
        "intermediate_size": dims.intermediate_size,
        "num_hidden_layers": dims.num_layers,
        "num_attention_heads": dims.num_heads,
        "vocab_size": dims.vocab_size,
        "pad_token_id": 0,  # by default that of the published vocabulary
        "tie_word_embeddings": dims.tied,
    }
    if family in LLAMA_LIKE or family is Family.PHI3:
        config |= {"num_key_value_heads": dims.num_kv_heads, "head_dim": dims.head_dim}
        config["sliding_window"] = dims.window
    if family in _WINDOW_SWITCHES:
        config["use_sliding_window"] = dims.window is not None
    if family is not Family.QWEN2 and (family in LLAMA_LIKE or family is Family.MODERNBERT):
        config["attention_bias"] = dims.attention_bias
    if family in (Family.LLAMA, Family.GRANITE, Family.MODERNBERT):
        config["mlp_bias"] = dims.mlp_bias
    if family is Family.OPT:
        config["word_embed_proj_dim"] = dims.hidden_size
    if dims.max_positions:
        config["max_position_embeddings"] = dims.max_positions
    if family in BERT_LIKE and dims.token_types:
        config["type_vocab_size"] = dims.token_types
    aliases = ALIASES.get(family, {})
    written = {"model_type": str(family)}
    written |= {aliases.get(name, name): value for name, value in config.items()}
    if dimensions_of(written) != dims:
        raise InvalidInput("model", f"a {family} config cannot be written from its sizes")
    return written


_WINDOW_SWITCHES = frozenset({Family.QWEN2, Family.QWEN3})
