"""Batching by length under a token budget, with the same batches on any number of ranks.

A step is one optimizer step. Its texts depend on seed and epoch alone, so a job on two ranks trains on
the same batches as on one; the number of ranks only decides how a step is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

# Texts are sorted by length within windows of this many batches: wide enough that neighbours have
# nearly the same length, narrow enough that batches differ between epochs.
WINDOW_BATCHES = 50


@dataclass(frozen=True)
class Step:
    """The micro-batches of one optimizer step: `micro_batches[rank][i]` is a list of row numbers.

    Every rank has the same number of them; an empty one is a dummy text of weight 0.
    """

    micro_batches: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def rows(self) -> list[int]:
        """Return the row numbers of the step over all ranks."""
        return [row for rank in self.micro_batches for part in rank for row in part]

    @property
    def num_micro_batches(self) -> int:
        """Return the number of forward passes of each rank."""
        return len(self.micro_batches[0])


def plan_epoch(
    lengths: Sequence[int] | Array,
    *,
    budget_tokens: int,
    batch_size: int,
    ranks: int,
    seed: int,
    epoch: int,
) -> list[Step]:
    """Assign every text to one step of `batch_size` texts (one may be smaller).

    No micro-batch has more than `budget_tokens` padded tokens. Raises ValueError where a single
    text is longer than the budget.
    """
    sizes = _checked_lengths(lengths, budget_tokens)
    draw = np.random.default_rng([seed, epoch])
    order = draw.permutation(len(sizes))
    window = batch_size * WINDOW_BATCHES
    batches = []
    for start in range(0, len(order), window):
        chunk = order[start : start + window]
        # Ties keep their shuffled order, so texts of equal length do not always share a batch.
        chunk = chunk[np.argsort(sizes[chunk], kind="stable")]
        batches += [chunk[i : i + batch_size] for i in range(0, len(chunk), batch_size)]
    # The batch with the longest text first: what does not fit in memory fails in the first step.
    batch_order = draw.permutation(len(batches))
    if len(batch_order):
        longest = max(
            range(len(batch_order)), key=lambda i: int(sizes[batches[batch_order[i]]].max())
        )
        batch_order[[0, longest]] = batch_order[[longest, 0]]
    return [
        _split_into_micro_batches(batches[i], sizes, budget_tokens=budget_tokens, ranks=ranks)
        for i in batch_order
    ]


def plan_evaluation(
    lengths: Sequence[int] | Array, *, budget_tokens: int, ranks: int
) -> list[Step]:
    """Assign all texts, longest first, to steps of one micro-batch per rank under the budget."""
    sizes = _checked_lengths(lengths, budget_tokens)
    order = np.argsort(-sizes, kind="stable")
    parts = _fill(order, sizes, budget_tokens)
    parts += [()] * (-len(parts) % ranks)
    return [
        Step(tuple((part,) for part in parts[start : start + ranks]))
        for start in range(0, len(parts), ranks)
    ]


def padding_share(steps: Sequence[Step], lengths: Sequence[int] | Array) -> float:
    """Return the share of padding among the tokens of all micro-batches, dummies included."""
    sizes = np.asarray(lengths)
    parts = [part for step in steps for rank in step.micro_batches for part in rank]
    padded = sum(_padded_tokens(part, sizes) if part else 1 for part in parts)
    real = sum(int(sizes[list(part)].sum()) for part in parts if part)
    return 1 - real / padded if padded else 0.0


def _split_into_micro_batches(
    batch: Array, sizes: Array, *, budget_tokens: int, ranks: int
) -> Step:
    """Split a batch into as few micro-batches as the budget allows, as even as possible in cost."""
    order = batch[np.argsort(-sizes[batch], kind="stable")]
    per_rank = -(-len(_fill(order, sizes, budget_tokens)) // ranks)
    num_parts = per_rank * ranks
    low, high = int(sizes[order].max()), budget_tokens
    while low < high:  # the smallest budget that needs no more than num_parts micro-batches
        middle = (low + high) // 2
        if len(_fill(order, sizes, middle)) <= num_parts:
            high = middle
        else:
            low = middle + 1
    parts = _fill(order, sizes, low)
    parts += [()] * (num_parts - len(parts))
    # Neighbours cost about the same and run concurrently on different ranks.
    return Step(tuple(tuple(parts[rank::ranks]) for rank in range(ranks)))


def _fill(order: Array, sizes: Array, budget_tokens: int) -> list[tuple[int, ...]]:
    """Fill micro-batches greedily with texts ordered from the longest."""
    parts: list[tuple[int, ...]] = []
    start = 0
    while start < len(order):
        count = max(1, budget_tokens // int(sizes[order[start]]))
        parts.append(tuple(order[start : start + count].tolist()))
        start += count
    return parts


def _padded_tokens(part: Sequence[int], sizes: Array) -> int:
    return int(sizes[list(part)].max()) * len(part)


def _checked_lengths(lengths: Sequence[int] | Array, budget_tokens: int) -> Array:
    sizes = np.asarray(lengths, dtype=np.int64)
    assert (sizes > 0).all()
    if len(sizes) and int(sizes.max()) > budget_tokens:
        raise ValueError(
            f"a text has {int(sizes.max())} tokens, more than training.micro_batch_tokens "
            f"({budget_tokens}): raise that or lower training.max_length"
        )
    return sizes
