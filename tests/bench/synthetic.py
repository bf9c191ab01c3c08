"""A student of Qwen3-0.6B's shape with seeded random weights, and texts of mixed lengths.

Random weights cost the same as trained ones. They have no outlier channels, so the 8-bit answers may agree
more often than a trained student's, for which there is the gate.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig

from services.api.serving.engines.dtype import choose_dtype
from services.api.serving.settings import ServingSettings
from services.shared.datasets.card import Head
from services.shared.model.artifact import (
    record_golden,
    save_classifier,
    save_golden,
    seal_artifact,
)
from services.shared.model.classifier import Classifier, build_classifier
from services.shared.model.tokens import encode, train_tokenizer

MAX_LENGTH = 256
# The dtype of every server and engine here that is not 8-bit, as a student would be served.
DTYPE = choose_dtype(ServingSettings().dtype, torch.device("cpu"))
TYPE = {torch.bfloat16: "bf16", torch.float32: "fp32"}[DTYPE]
HEADS = [Head(name=f"h{n}", labels=[f"c{c:02}" for c in range(n)]) for n in (2, 3, 5, 10, 20)]
QWEN3_06B = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
}


def make_texts(count: int, *, seed: int = 0) -> list[str]:
    """Return texts of 8 to some 230 tokens, log-normal with a median of about 40."""
    random = np.random.default_rng(seed)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyz"))
    dictionary = np.random.default_rng(1)  # the same for every seed
    words = ["".join(dictionary.choice(letters, dictionary.integers(2, 9))) for _ in range(3000)]
    rank = np.arange(1, len(words) + 1)
    weights = (1 / rank) / (1 / rank).sum()
    lengths = np.clip(random.lognormal(3.45, 0.7, count), 6, 180).astype(int)
    return [" ".join(random.choice(words, length, p=weights)) for length in lengths]


def write_student(directory: Path, *, layers: int, seed: int) -> None:
    """Write a sealed artifact in bfloat16, unless it is there already."""
    if (directory / "manifest.json").exists():
        return
    tokenizer = train_tokenizer(make_texts(2000, seed=99), vocab_size=6000, directory=directory)
    config = AutoConfig.for_model(
        "qwen3", num_hidden_layers=layers, pad_token_id=tokenizer.pad_token_id, **QWEN3_06B
    )
    torch.manual_seed(seed)
    classifier = build_classifier(config, HEADS, dtype=torch.bfloat16).eval()
    tokens, _ = encode(make_texts(48, seed=5), tokenizer, max_length=MAX_LENGTH, prefix="")
    _balance(classifier, tokens)
    save_classifier(classifier, directory)
    golden = record_golden(
        classifier, tokenizer, make_texts(4, seed=6), max_length=MAX_LENGTH, prefix=""
    )
    save_golden(directory, golden)
    seal_artifact(
        directory,
        heads=HEADS,
        pooling=classifier.pooling,
        prefix="",
        lineage={},
        metrics={},
        max_length=MAX_LENGTH,
    )


@torch.inference_mode()
def _balance(classifier: Classifier, tokens: list[list[int]]) -> None:
    """Shift and scale the heads so that every class is predicted about equally often."""
    answers = [classifier(torch.tensor([text])) for text in tokens]
    for head in HEADS:
        logits = torch.cat([answer[head.name] for answer in answers])
        linear = classifier.heads[head.name]
        assert isinstance(linear, torch.nn.Linear)
        scale = 1 / logits.std(dim=0).clamp_min(1e-6)
        linear.weight.mul_(scale[:, None])
        linear.bias.copy_(-logits.mean(dim=0) * scale)
