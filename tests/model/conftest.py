"""Small models, heads and a tokenizer for the tests of `services.shared.model`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.shared.datasets.card import Head, HeadType
from services.shared.model.classifier import (
    Classifier,
    build_classifier,
    build_config,
    initialise_heads,
)
from services.shared.model.tokens import train_tokenizer

TEXTS = [
    "The room was clean and the staff were kind.",
    "The book arrived late and its pages were torn.",
    "屏幕很清楚，电池也耐用。",
    "酒店太吵，一晚没睡好。",
    "Fine.",
    "A long story about a laptop that broke twice in a week, was repaired, and broke again.",
]
ENCODERS = {"bert", "xlm-roberta", "roberta", "modernbert", "distilbert", "electra"}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
OWN_NAMES: dict[str, dict[str, Any]] = {
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
}

MakeClassifier = Callable[..., Classifier]


@pytest.fixture(scope="session")
def heads() -> list[Head]:
    return [
        Head(name="sentiment", labels=["bad", "good"]),
        Head(name="topics", type=HeadType.MULTI_LABEL, labels=["book", "hotel", "price"]),
    ]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(TEXTS, vocab_size=320, directory=directory)
    return directory


@pytest.fixture(scope="session")
def make_classifier(heads: list[Head]) -> MakeClassifier:
    """Return a function that builds a tiny untrained classifier in evaluation mode."""

    def make(model_type: str, seed: int = 0, **fields: int) -> Classifier:
        grouped = {} if model_type in ENCODERS else {"num_key_value_heads": 2}
        config = build_config(
            {"model_type": model_type, **OWN_NAMES.get(model_type, SMALL), **grouped, **fields},
            vocab_size=320,
            pad_token_id=0,
        )
        torch.manual_seed(seed)
        classifier = build_classifier(config, heads)
        initialise_heads(classifier, seed)
        return classifier.eval()

    return make
