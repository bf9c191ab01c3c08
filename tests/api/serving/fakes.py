"""An encoder and an engine that need no model, for tests of the code around them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from services.api.serving.active_models import ActiveModel
from services.api.serving.encoder import Encoded
from services.api.serving.errors import TextTooLong
from services.api.serving.prediction import FloatArray
from services.shared.datasets.card import Head, HeadType
from services.shared.datasets.text import Text, plain_text

HEADS = [
    Head(name="tone", labels=["bad", "good"]),
    Head(name="topics", type=HeadType.MULTI_LABEL, labels=["book", "food", "hotel"]),
]


class WordEncoder:
    """Encodes each word as one token, its number of letters."""

    def __init__(self, max_length: int = 32) -> None:
        self.max_length = max_length

    def encode(self, texts: Sequence[Text], *, truncate: bool) -> list[Encoded]:
        encoded = []
        for index, text in enumerate(texts):
            tokens = [len(word) for word in plain_text(text).split()]
            if len(tokens) > self.max_length and not truncate:
                raise TextTooLong(index, len(tokens), self.max_length)
            encoded.append(Encoded(tokens[: self.max_length], len(tokens) > self.max_length))
        return encoded


class CountingEngine:
    """Returns (number of tokens, first token) as logits of `tone`; records batches and can be blocked."""

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
        assert self.open.wait(20), "the test never unblocked the engine"
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
    """Return a model with the head types of HEADS that serves without weights."""
    return ActiveModel(
        name="student",
        version=version,
        model_id=f"mdl_{version}",
        heads=HEADS,
        max_length=max_length,
        encoder=WordEncoder(max_length),
        engine=engine or CountingEngine(),
    )
