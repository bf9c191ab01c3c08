"""A config.json is a stranger's file: absurd values are refused with their key."""

import time
from typing import Any

import pytest

from services.shared.memory.architecture import presets
from services.shared.memory.architecture.hf_config import dimensions_of
from services.shared.memory.errors import InvalidInput

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": 1001}, "model.num_hidden_layers"),
        ({"num_hidden_layers": 10**6}, "model.num_hidden_layers"),
        ({"num_hidden_layers": 10**5000}, "model.num_hidden_layers"),
        ({"hidden_size": "9" * 5000}, "model.hidden_size"),
        ({"model_type": "x" * 5000}, "model.model_type"),
        ({"model_type": "t5", "num_decoder_layers": 10**6}, "model.num_decoder_layers"),
        (
            {"model_type": "bert", "max_position_embeddings": 8, "hidden_dropout_prob": "a"},
            "model.hidden_dropout_prob",
        ),
        (
            {
                "model_type": "deepseek_v3",
                "n_routed_experts": 4,
                "moe_intermediate_size": 8,
                "num_experts_per_tok": 2,
                "n_shared_experts": "many",
            },
            "model.n_shared_experts",
        ),
        ({"model_type": "deepseek_v3", "q_lora_rank": "a"}, "model.q_lora_rank"),
    ],
)
def test_absurd_sizes_of_a_config_are_refused_with_their_key(
    changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidInput) as refusal:
        dimensions_of({**LLAMA, **changes})
    assert refusal.value.field == field
    assert len(str(refusal.value)) < 1000


def test_a_name_of_many_suffixes_is_looked_up_in_linear_time() -> None:
    started = time.perf_counter()
    presets.find_exact("-instruct" * 10_000)
    presets.find_in_text("-instruct-v1.1" * 10_000)
    assert time.perf_counter() - started < 1
