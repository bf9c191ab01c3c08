"""Stand-ins for the tests of the serving room: an encoder of words and engines without a model."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from services.api.serving.active_models import ActiveModel
from services.api.serving.encoder import Encoded
from services.api.serving.errors import TextTooLong
from services.api.serving.prediction import FloatArray
from services.shared.datasets.card import Head, HeadType
from services.shared.model.artifact import (
    record_golden,
    save_classifier,
    save_golden,
    seal_artifact,
)
from services.shared.model.classifier import build_classifier
from services.shared.model.tokens import train_tokenizer

HEADS = [
    Head(name="tone", labels=["bad", "good"]),
    Head(name="topics", type=HeadType.MULTI_LABEL, labels=["book", "food", "hotel"]),
]


class WordEncoder:
    """One token a word: its number of letters."""

    def __init__(self, max_length: int = 32) -> None:
        self.max_length = max_length

    def encode(self, texts: Sequence[str], *, truncate: bool) -> list[Encoded]:
        encoded = []
        for index, text in enumerate(texts):
            tokens = [len(word) for word in text.split()]
            if len(tokens) > self.max_length and not truncate:
                raise TextTooLong(index, len(tokens), self.max_length)
            encoded.append(Encoded(tokens[: self.max_length], len(tokens) > self.max_length))
        return encoded


class CountingEngine:
    """Answers `tone` with (number of tokens, first token); remembers the batches and can be held up."""

    kind = "counting"
    runs_on_cpu = True

    def __init__(self, on_run: Callable[[], None] | None = None) -> None:
        self.batches: list[list[list[int]]] = []
        self.threads: list[int] = []  # that each batch ran with
        self.open = threading.Event()
        self.open.set()
        self.running = threading.Event()
        self.is_closed = False
        self._on_run = on_run

    def run(self, texts: Sequence[Sequence[int]], *, threads: int = 1) -> dict[str, FloatArray]:
        assert not self.is_closed, "run after close"
        self.threads.append(threads)
        self.batches.append([list(text) for text in texts])
        self.running.set()
        assert self.open.wait(20), "the test never let the engine go on"
        if self._on_run is not None:
            self._on_run()
        assert not self.is_closed, "closed while running"
        tone = np.array([[len(text), text[0]] for text in texts], np.float32)
        return {"tone": tone, "topics": np.zeros((len(texts), 3), np.float32)}

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def close(self) -> None:
        self.is_closed = True


def make_student(
    engine: CountingEngine | None = None, *, version: str = "v1", max_length: int = 32
) -> ActiveModel:
    return ActiveModel(
        name="student",
        version=version,
        model_id=f"mdl_{version}",
        heads=HEADS,
        max_length=max_length,
        encoder=WordEncoder(max_length),
        engine=engine or CountingEngine(),
    )


@pytest.fixture
def new_engine() -> type[CountingEngine]:
    """Make engines without a model."""
    return CountingEngine


@pytest.fixture
def new_student() -> Callable[..., ActiveModel]:
    """Make students without a model."""
    return make_student


# Small, but with every feature of the family: grouped heads, a head width that is not H / A.
CONFIGS: dict[str, dict[str, Any]] = {
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
}


def write_artifact(
    directory: Path,
    family: str,
    *,
    seed: int = 0,
    stored: torch.dtype = torch.float32,
    **changes: Any,
) -> Path:
    """Write a sealed artifact with random weights that are wide enough to tell texts apart."""
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
    save_golden(directory, record_golden(classifier, tokenizer, words, max_length=24))
    seal_artifact(
        directory,
        heads=HEADS,
        pooling=classifier.pooling,
        lineage={},
        metrics={},
        max_length=24,
    )
    return directory


@pytest.fixture
def new_artifact(tmp_path: Path) -> Callable[..., Path]:
    """Write artifacts of a family of backbones."""
    numbers = itertools.count()
    return lambda family, **options: write_artifact(
        tmp_path / f"artifact_{next(numbers)}", family, **options
    )
