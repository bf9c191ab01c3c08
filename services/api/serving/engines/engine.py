"""The interface of all engines. Torch-free: only the engines themselves import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from services.api.serving.prediction import FloatArray


class Engine(Protocol):
    """A loaded model. `run` may be called from several threads at once, which share the weights."""

    @property
    def kind(self) -> str:
        """Return the engine's name in metrics, logs and the database, e.g. `packed-bfloat16`."""
        ...

    @property
    def runs_on_cpu(self) -> bool:
        """Return whether the CPU computes; an accelerator gains nothing from smaller batches."""
        ...

    def run(self, texts: Sequence[Sequence[int]], *, threads: int = 1) -> Mapping[str, FloatArray]:
        """Return the logits [N, C] of each head for N non-empty token lists."""
        ...

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Return how many tokens a batch of texts of these lengths computes, padding included."""
        ...

    def close(self) -> None:
        """Release the weights. No call of `run` may follow or be in progress."""
        ...


def warm_up(engine: Engine, *, batch_tokens: int, max_length: int, threads: int) -> None:
    """Run a few shapes, so that the first requests do not pay for buffers, compilation and page faults.

    On a CPU with one thread too, as compiled code is specialised on the number of threads.
    """
    short = [1] * min(8, max_length)
    longest = min(max_length, batch_tokens)
    for count in {1, threads} if engine.runs_on_cpu else {threads}:
        engine.run([short], threads=count)
        engine.run([[1] * longest], threads=count)
        engine.run([short, [1], short, [1, 2]], threads=count)
