"""A model that can be planned. Imported by both environments: the platform's and schemathesis's."""

SMALL_MODEL = {
    "config": {
        "model_type": "qwen3",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "tokenizer": {"train": True, "vocab_size": 400},
}
