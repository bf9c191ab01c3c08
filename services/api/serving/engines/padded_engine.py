"""The padded engine: runs any backbone that transformers loads, in buckets of similar length.

Legend: N texts, S tokens of the longest text of a bucket, C labels of a head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from services.api.serving.engines.torch_threads import use_threads
from services.api.serving.prediction import FloatArray
from services.shared.model.classifier import Classifier
from services.shared.model.tokens import pad

# The most padded over real tokens of a bucket. From 1.14 on, a second, smaller matrix product costs
# less than the padding (measured with Qwen3-0.6B shapes on Zen 4).
MAX_PADDED_OVER_REAL = 1.15


class PaddedEngine:
    """Runs the forward pass of a transformers classifier."""

    def __init__(self, classifier: Classifier, *, batch_tokens: int) -> None:
        self._classifier: Classifier | None = classifier.eval()
        parameter = next(classifier.parameters())
        self._device = parameter.device
        self._batch_tokens = batch_tokens
        self.kind = f"transformers-{str(parameter.dtype).removeprefix('torch.')}"

    @property
    def runs_on_cpu(self) -> bool:
        """Return whether the weights are in host memory."""
        return self._device.type == "cpu"

    def run(self, texts: Sequence[Sequence[int]], *, threads: int = 1) -> dict[str, FloatArray]:
        """Return the logits [N, C] of each head for N non-empty token lists."""
        assert self._classifier is not None, "the engine is closed"
        use_threads(threads)
        logits = {
            head.name: np.empty((len(texts), len(head.labels)), np.float32)
            for head in self._classifier.head_specs
        }
        for rows in length_buckets([len(text) for text in texts], budget=self._batch_tokens):
            with torch.inference_mode():
                # Any token pads: padding is masked.
                batch = pad([texts[row] for row in rows], 0).to(self._device)
                outputs = self._classifier(*batch)
            for name, values in outputs.items():
                logits[name][rows] = values.float().cpu().numpy()
        return logits

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Return how many tokens a batch of texts of these lengths computes, padding included."""
        return sum(
            len(rows) * max(lengths[row] for row in rows)
            for rows in length_buckets(lengths, budget=self._batch_tokens)
        )

    def close(self) -> None:
        """Release the weights."""
        self._classifier = None


def length_buckets(lengths: Sequence[int], *, budget: int) -> Iterator[list[int]]:
    """Yield rows in groups of similar length, each within `budget` padded tokens and with little padding."""
    rows: list[int] = []
    real = 0
    for row in sorted(range(len(lengths)), key=lengths.__getitem__):
        padded = (len(rows) + 1) * lengths[row]
        if rows and (padded > budget or padded > MAX_PADDED_OVER_REAL * (real + lengths[row])):
            yield rows
            rows, real = [], 0
        rows.append(row)
        real += lengths[row]
    if rows:
        yield rows
