"""The queue of texts, and which of them make up the next batch. Pure and synchronous."""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

GroupT = TypeVar("GroupT", bound=Hashable)
OwnerT = TypeVar("OwnerT")


@dataclass(eq=False)
class QueuedText(Generic[GroupT, OwnerT]):
    """One text in the queue. Only texts of the same group (the same model) share a batch."""

    group: GroupT
    owner: OwnerT
    index: int
    tokens: list[int]
    arrival: int = field(default=0, init=False)
    removed: bool = field(default=False, init=False)  # taken, cancelled or expired


class RequestQueue(Generic[GroupT, OwnerT]):
    """A queue that yields batches within a token budget."""

    def __init__(self) -> None:
        self.tokens = 0
        self._groups: dict[GroupT, _Group[GroupT, OwnerT]] = {}
        self._arrivals = itertools.count()

    def __bool__(self) -> bool:
        return self.tokens > 0

    def add(self, text: QueuedText[GroupT, OwnerT]) -> None:
        """Append a text that has at least one token."""
        assert text.tokens, "a text without tokens cannot be queued"
        text.arrival = next(self._arrivals)
        self._groups.setdefault(text.group, _Group()).add(text)
        self.tokens += len(text.tokens)

    def remove(self, text: QueuedText[GroupT, OwnerT]) -> None:
        """Remove a text; does nothing if it was removed before."""
        if not text.removed:
            text.removed = True
            self.tokens -= len(text.tokens)

    def next_group(self) -> GroupT:
        """Return the group of the next batch. The queue must not be empty."""
        group = self._oldest_group()
        assert group is not None, "the queue is empty"
        oldest = group.oldest()
        assert oldest is not None
        return oldest.group

    def take(self, budget_tokens: int) -> list[QueuedText[GroupT, OwnerT]]:
        """Take the oldest text, then those closest to it in length, within the budget.

        A text longer than the budget becomes a batch of its own. Returns [] if the queue is empty.
        """
        group = self._oldest_group()
        if group is None:
            return []
        oldest = group.oldest()
        assert oldest is not None
        self.remove(oldest)
        length = len(oldest.tokens)
        batch = [oldest, *group.take_closest(length, budget_tokens - length)]
        for text in batch[1:]:
            self.remove(text)
        return batch

    def _oldest_group(self) -> _Group[GroupT, OwnerT] | None:
        first: _Group[GroupT, OwnerT] | None = None
        arrival = -1
        for key, group in list(self._groups.items()):
            oldest = group.oldest()
            if oldest is None:
                del self._groups[key]  # otherwise it would keep a retired model alive
            elif first is None or oldest.arrival < arrival:
                first, arrival = group, oldest.arrival
        return first


class _Group(Generic[GroupT, OwnerT]):
    """The queued texts of one model, by arrival and by length.

    Removed texts are skipped when they reach the front, so that removing one takes constant time.
    """

    def __init__(self) -> None:
        self.by_arrival: deque[QueuedText[GroupT, OwnerT]] = deque()
        self.by_length: dict[int, deque[QueuedText[GroupT, OwnerT]]] = {}
        self.lengths: list[int] = []  # sorted keys of by_length

    def add(self, text: QueuedText[GroupT, OwnerT]) -> None:
        self.by_arrival.append(text)
        length = len(text.tokens)
        if length not in self.by_length:
            self.by_length[length] = deque()
            bisect.insort(self.lengths, length)
        self.by_length[length].append(text)

    def oldest(self) -> QueuedText[GroupT, OwnerT] | None:
        while self.by_arrival and self.by_arrival[0].removed:
            self.by_arrival.popleft()
        return self.by_arrival[0] if self.by_arrival else None

    def take_closest(self, length: int, budget: int) -> list[QueuedText[GroupT, OwnerT]]:
        """Take texts in order of their distance from `length`, oldest first within one length."""
        chosen: list[QueuedText[GroupT, OwnerT]] = []
        right = bisect.bisect_left(self.lengths, length)
        for candidate in _by_distance(self.lengths[:right], self.lengths[right:], length):
            queue = self.by_length[candidate]
            while queue and (queue[0].removed or candidate <= budget):
                text = queue.popleft()
                if not text.removed:
                    chosen.append(text)
                    budget -= candidate
            if not queue:
                self._delete_length(candidate)
            if budget <= 0:
                break
        return chosen

    def _delete_length(self, length: int) -> None:
        del self.by_length[length]
        del self.lengths[bisect.bisect_left(self.lengths, length)]


def _by_distance(below: list[int], above: list[int], centre: int) -> Iterator[int]:
    """Merge two sorted lists in order of distance from `centre`."""
    left, right = len(below) - 1, 0
    while left >= 0 or right < len(above):
        take_left = right >= len(above) or (
            left >= 0 and centre - below[left] <= above[right] - centre
        )
        if take_left:
            yield below[left]
            left -= 1
        else:
            yield above[right]
            right += 1
