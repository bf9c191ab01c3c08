"""A batch of texts without padding: their tokens one after the other, the shortest text first.

Legend: N texts, T packed tokens of all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.shared.model.segments import unmark_types


class LengthGroup(NamedTuple):
    """Adjacent texts of equal length."""

    start: int  # position of the first token
    num_texts: int
    length: int  # tokens per text


@dataclass(frozen=True)
class PackedBatch:
    """N texts concatenated to T tokens, sorted by length so that equal lengths are adjacent."""

    order: list[int]  # packed position -> index of the text
    groups: list[LengthGroup]
    tokens: NDArray[np.int64]  # [T]
    types: NDArray[np.int64] | None  # [T], None where all are 0
    positions: NDArray[np.int64]  # [T]
    first: NDArray[np.int64]  # [N], the position of each text's first token
    last: NDArray[np.int64]  # [N], of its last token


def pack(texts: Sequence[Sequence[int]]) -> PackedBatch:
    """Concatenate texts, shortest first."""
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    lengths = np.array([len(texts[index]) for index in order])
    ends = np.cumsum(lengths)
    starts = ends - lengths
    groups = []
    first = 0
    for index in range(1, len(order) + 1):
        if index == len(order) or lengths[index] != lengths[first]:
            groups.append(LengthGroup(int(starts[first]), index - first, int(lengths[first])))
            first = index
    tokens, types = unmark_types(np.concatenate([np.asarray(texts[i], np.int64) for i in order]))
    return PackedBatch(
        order=order,
        groups=groups,
        tokens=tokens,
        types=types,
        positions=np.arange(ends[-1]) - np.repeat(starts, lengths),
        first=starts,
        last=ends - 1,
    )
