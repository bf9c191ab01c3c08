"""Sealed artifacts of small models with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from transformers import AutoConfig

from services.shared.model.artifact import (
    record_golden,
    save_classifier,
    save_golden,
    seal_artifact,
)
from services.shared.model.classifier import build_classifier
from services.shared.model.tokens import train_tokenizer
from tests.api.serving.fakes import HEADS

# Small, but with every feature of the family: grouped heads, a head width other than H / A.
CONFIGS: dict[str, dict[str, int]] = {
    "qwen3": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "bert": {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
}


def write_artifact(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    stored: torch.dtype = torch.float32,
    **changes: int,
) -> Path:
    """Write a sealed artifact whose random weights are spread enough to distinguish texts."""
    words = ["the room was clean and the staff kind", "the battery died", "a good book about food"]
    tokenizer = train_tokenizer(words * 3, vocab_size=400, directory=directory)
    settings = {**CONFIGS[family], "vocab_size": len(tokenizer), **changes}
    config = AutoConfig.for_model(family, pad_token_id=tokenizer.pad_token_id, **settings)
    torch.manual_seed(seed)
    classifier = build_classifier(config, HEADS).eval()
    for parameter in classifier.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    classifier.to(stored)
    save_classifier(classifier, directory)
    classifier.float()
    save_golden(directory, record_golden(classifier, tokenizer, words, max_length=24, prefix=""))
    seal_artifact(
        directory,
        heads=HEADS,
        pooling=classifier.pooling,
        prefix="",
        lineage={},
        metrics={},
        max_length=24,
    )
    return directory


class NewArtifact(Protocol):
    """The fixture `new_artifact`: writes an artifact into a directory of its own."""

    def __call__(
        self,
        family: str,
        *,
        seed: int = 0,
        stored: torch.dtype = torch.float32,
        **changes: int,
    ) -> Path: ...
