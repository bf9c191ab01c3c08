"""Writes malicious model directories, each with what its refusal says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 8,
}
TENSOR = {"dtype": "F32", "shape": [8, 8], "data_offsets": [0, 256]}
_VOCAB = {"<unk>": 0, "a": 1, "b": 2, "!": 3}


def safetensors(path: Path, header: Any, *, size: int = 256, stated: int | None = None) -> None:
    """Write a file with a header, which may state any length, and `size` bytes of data."""
    text = json.dumps(header).encode()
    length = len(text) if stated is None else stated
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(size))


def tokenizer_json(**fields: Any) -> dict[str, Any]:
    """Return a tokenizer of four words, with other parts."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": _VOCAB, "unk_token": "<unk>"},
        **fields,
    }


def write_honest(directory: Path) -> Path:
    """Write a small model directory that is accepted."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    safetensors(directory / "model.safetensors", {"w": TENSOR})
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
    (directory / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 1e30}))
    return directory


@dataclass(frozen=True)
class Malicious:
    """How an honest directory is made malicious, and what the refusal says."""

    name: str
    change: Callable[[Path], object]
    says: str


def _config(**fields: Any) -> Callable[[Path], object]:
    return lambda d: (d / "config.json").write_text(json.dumps({**CONFIG, **fields}))


def _text(name: str, text: str) -> Callable[[Path], object]:
    return lambda d: (d / name).write_text(text)


def _tokenizer(**fields: Any) -> Callable[[Path], object]:
    return lambda d: (d / "tokenizer.json").write_text(json.dumps(tokenizer_json(**fields)))


def _weights(header: Any, **options: Any) -> Callable[[Path], object]:
    return lambda d: safetensors(d / "model.safetensors", header, **options)


def _pipe(name: str) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        os.mkfifo(directory / name)

    return change


def _sparse(name: str, size: int) -> Callable[[Path], object]:
    def change(directory: Path) -> None:
        with (directory / name).open("wb") as file:
            file.truncate(size)

    return change


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def _replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def _index(weight_map: object) -> Callable[[Path], object]:
    return _text("model.safetensors.index.json", json.dumps({"weight_map": weight_map}))


_OVERLAP = {"a": TENSOR, "b": {"dtype": "F32", "shape": [8, 4], "data_offsets": [128, 256]}}
_DOUBLING = {"type": "Sequence", "normalizers": [_replace("a", "aa")] * 40}
_FIXED_PADDING = {
    "strategy": {"Fixed": 10**9},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "<unk>",
}
_LIMITS = "running its tokenizer"

MALICIOUS = [
    Malicious(
        "auto_map", _config(auto_map={"AutoModel": "x.Y"}), "names code of its own (auto_map)"
    ),
    Malicious("code_file", _text("modeling_x.py", "import os"), "'modeling_x.py' is code"),
    Malicious(
        "auto_map_of_tokenizer",
        _text("tokenizer_config.json", '{"auto_map": {"AutoTokenizer": ["x.Y", null]}}'),
        "tokenizer_config.json names code of its own",
    ),
    Malicious("config_is_a_list", _text("config.json", "[]"), "does not hold a JSON object"),
    Malicious("config_is_no_json", _text("config.json", "{"), "is not readable JSON"),
    Malicious("config_is_deep", _text("config.json", '{"a":' * 50_000), "nested too deeply"),
    Malicious("config_nests", _config(a=json.loads("[" * 60 + "]" * 60)), "nested deeper than 32"),
    Malicious("config_is_a_pipe", _pipe("config.json"), "not a regular file"),
    Malicious("config_is_huge", _sparse("config.json", 2**33), "more than the 4,194,304"),
    Malicious("tokenizer_is_huge", _sparse("tokenizer.json", 2**34), "bytes, more than"),
    Malicious("index_is_huge", _sparse("model.safetensors.index.json", 2**33), "bytes, more than"),
    Malicious("enormous_number", _config(max_position_embeddings=10**30), "is larger than"),
    Malicious(
        "many_digits", _text("config.json", '{"a": ' + "9" * 5000 + "}"), "not readable JSON"
    ),
    Malicious("infinity", _text("config.json", '{"rope_theta": Infinity}'), "not a finite number"),
    Malicious("billion_labels", _config(num_labels=10**9), "num_labels is 1,000,000,000"),
    Malicious("header_of_exabytes", _weights({"w": TENSOR}, stated=2**62), "states a header"),
    Malicious(
        "header_longer_than_file", _weights({"w": TENSOR}, stated=10**6), "longer than the file"
    ),
    Malicious("header_is_no_json", _weights("x" * 10), "not a safetensors file"),
    Malicious(
        "tensor_beyond_the_end",
        _weights({"w": {**TENSOR, "data_offsets": [0, 10**12]}}),
        "ends after the file's end",
    ),
    Malicious(
        "shape_larger_than_bytes",
        _weights({"w": {**TENSOR, "shape": [10**6, 10**6]}}),
        "states a false size",
    ),
    Malicious(
        "shape_of_huge_numbers", _weights({"w": {**TENSOR, "shape": [10**300]}}), "not a size"
    ),
    Malicious("shape_of_negatives", _weights({"w": {**TENSOR, "shape": [-8, -8]}}), "not a size"),
    Malicious("many_dimensions", _weights({"w": {**TENSOR, "shape": [1] * 10**5}}), "dimensions"),
    Malicious("tensors_overlap", _weights(_OVERLAP), "overlaps another"),
    Malicious("shard_outside", _index({"w": "../other/model.safetensors"}), "no safetensors file"),
    Malicious("shard_is_a_pickle", _index({"w": "pytorch_model.bin"}), "no safetensors file"),
    Malicious("shard_is_missing", _index({"w": "gone.safetensors"}), "which is missing"),
    Malicious("tokenizer_is_no_tokenizer", _text("tokenizer.json", "{}"), "cannot be loaded"),
    Malicious(
        "pattern_explodes",
        _tokenizer(pre_tokenizer=_split(r"(a+)+$|(a|a)*b|(.*a){20}c")),
        "tokenizer",
    ),
    Malicious("text_doubles", _tokenizer(normalizer=_DOUBLING), _LIMITS),
    Malicious("padding_of_a_billion", _tokenizer(padding=_FIXED_PADDING), "tokenizer"),
]
