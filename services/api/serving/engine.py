"""The small interface behind which every engine stands. Torch-free: only engine modules load torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.api.serving.prediction import FloatArray


class Engine(Protocol):
    """A loaded student. `run` may be called from several lanes at once; they share the weights."""

    @property
    def kind(self) -> str:
        """Return what the engine is called in metrics and logs, for example `packed-bfloat16`."""
        ...

    def run(self, texts: Sequence[Sequence[int]]) -> Mapping[str, FloatArray]:
        """Return the logits [N, C] of each head for N token lists, none of them empty."""
        ...

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Return how many tokens a batch of such texts costs, padding included."""
        ...

    def close(self) -> None:
        """Let go of the weights. No call of `run` follows or is under way."""
        ...


def warm_up(engine: Engine, *, batch_tokens: int, max_length: int) -> None:
    """Run a few shapes, so that first requests do not pay for buffers, plans and page faults."""
    one = [1] * min(8, max_length)
    engine.run([one])
    longest = min(max_length, batch_tokens)
    engine.run([[1] * longest])
    engine.run([one, [1], one, [1, 2]])
