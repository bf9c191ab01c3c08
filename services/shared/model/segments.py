"""Token types of pairs, kept within the token ids: a token of the second segment is stored as its complement.

So one array of integers per text goes through files, queues and batches, and a token of type 1 is negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def mark_types(ids: Sequence[int], types: Sequence[int]) -> list[int]:
    """Return token ids with those of type 1 as their complement."""
    return [~token if kind else token for token, kind in zip(ids, types, strict=True)]


def plain_ids(marked: Sequence[int]) -> list[int]:
    """Return the token ids without their types."""
    return [max(token, ~token) for token in marked]


def unmark_types(marked: Ids) -> tuple[Ids, Ids | None]:
    """Return the token ids and their types, of equal shapes; the types are None where all are 0."""
    is_second = marked < 0
    if not is_second.any():
        return marked, None
    return np.where(is_second, ~marked, marked), is_second.astype(np.int64)
