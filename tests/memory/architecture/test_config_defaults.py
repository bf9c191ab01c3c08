"""What a config leaves out has the value that transformers gives it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import AutoConfig

from services.shared.memory.architecture.dimensions import Family
from services.shared.memory.architecture.hf_config import ALIASES, dimensions_of
from services.shared.memory.errors import InvalidInput

# As many heads as every family's default of key and value heads divides.
SIZES = {
    "hidden_size": 1280,
    "num_hidden_layers": 3,
    "num_attention_heads": 128,
    "vocab_size": 300_000,
}
# Their classes have no such default.
EXPERTS: dict[Family, dict[str, object]] = {
    Family.DEEPSEEK_V2: {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "n_shared_experts": 1,
    }
}


@pytest.mark.parametrize("family", Family)
def test_a_config_of_sizes_alone_has_the_defaults_of_transformers(family: Family) -> None:
    aliases = ALIASES.get(family, {})
    given: dict[str, object] = {aliases.get(name, name): size for name, size in SIZES.items()}
    given |= EXPERTS.get(family, {})
    whole = AutoConfig.for_model(str(family), **given).to_dict()
    found, expected = dimensions_of({"model_type": str(family)} | given), dimensions_of(whole)
    if expected.latent is not None:  # its heads have widths of their own, and head_dim is not read
        found = replace(found, head_dim=expected.head_dim)
    assert found == expected


def test_a_default_that_does_not_fit_the_given_sizes_is_named() -> None:
    config = {"model_type": "qwen3"} | SIZES | {"num_attention_heads": 4}
    with pytest.raises(InvalidInput) as refused:
        dimensions_of(config)
    assert str(refused.value) == (
        "model.num_key_value_heads: 32, the default of qwen3, do not divide 4 attention heads; "
        "accepted: 4 where heads are not grouped"
    )


def test_missing_sizes_are_all_named() -> None:
    with pytest.raises(InvalidInput, match="the distilbert config lacks n_layers, vocab_size"):
        dimensions_of({"model_type": "distilbert", "dim": 64, "n_heads": 2})
