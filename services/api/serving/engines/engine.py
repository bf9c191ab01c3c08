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

    @property
    def on_processor(self) -> bool:
        """Say whether the processor computes; an accelerator gains nothing by smaller batches."""
        ...

    def run(self, texts: Sequence[Sequence[int]], *, threads: int = 1) -> Mapping[str, FloatArray]:
        """Return the logits [N, C] of each head for N token lists, none of them empty."""
        ...

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Return how many tokens a batch of such texts costs, padding included."""
        ...

    def close(self) -> None:
        """Let go of the weights. No call of `run` follows or is under way."""
        ...


def warm_up(engine: Engine, *, batch_tokens: int, max_length: int, threads: int) -> None:
    """Run a few shapes, so that first requests do not pay for buffers, plans and page faults.

    With the threads of a whole lane and with one: compiled code is specialised on their number.
    """
    one = [1] * min(8, max_length)
    longest = min(max_length, batch_tokens)
    for count in {1, threads} if engine.on_processor else {threads}:
        engine.run([one], threads=count)
        engine.run([[1] * longest], threads=count)
        engine.run([one, [1], one, [1, 2]], threads=count)
