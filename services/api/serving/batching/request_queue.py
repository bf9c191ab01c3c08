"""The texts that wait, and which of them make the next batch. Pure and synchronous."""

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
class WaitingText(Generic[GroupT, OwnerT]):
    """One text in the queue. Only texts of one group (one student) share a batch."""

    group: GroupT
    owner: OwnerT
    index: int
    tokens: list[int]
    arrival: int = field(default=0, init=False)
    gone: bool = field(default=False, init=False)  # taken, cancelled or expired


class _Group(Generic[GroupT, OwnerT]):
    """The waiting texts of one student, by arrival and by length."""

    def __init__(self) -> None:
        self.by_arrival: deque[WaitingText[GroupT, OwnerT]] = deque()
        self.by_length: dict[int, deque[WaitingText[GroupT, OwnerT]]] = {}
        self.lengths: list[int] = []  # sorted keys of by_length

    def add(self, text: WaitingText[GroupT, OwnerT]) -> None:
        self.by_arrival.append(text)
        length = len(text.tokens)
        if length not in self.by_length:
            self.by_length[length] = deque()
            bisect.insort(self.lengths, length)
        self.by_length[length].append(text)

    def oldest(self) -> WaitingText[GroupT, OwnerT] | None:
        while self.by_arrival and self.by_arrival[0].gone:
            self.by_arrival.popleft()
        return self.by_arrival[0] if self.by_arrival else None

    def nearest(self, length: int, budget: int) -> list[WaitingText[GroupT, OwnerT]]:
        """Take texts from the nearest length outwards, the oldest first within one length."""
        chosen: list[WaitingText[GroupT, OwnerT]] = []
        right = bisect.bisect_left(self.lengths, length)
        for candidate in _outwards(self.lengths[:right], self.lengths[right:], length):
            queue = self.by_length[candidate]
            while queue and (queue[0].gone or candidate <= budget):
                text = queue.popleft()
                if not text.gone:
                    chosen.append(text)
                    budget -= candidate
            if not queue:
                self._forget(candidate)
            if budget <= 0:
                break
        return chosen

    def _forget(self, length: int) -> None:
        del self.by_length[length]
        del self.lengths[bisect.bisect_left(self.lengths, length)]


class WaitingTexts(Generic[GroupT, OwnerT]):
    """A queue that gives out batches within a budget of tokens."""

    def __init__(self) -> None:
        self.tokens = 0
        self._groups: dict[GroupT, _Group[GroupT, OwnerT]] = {}
        self._arrivals = itertools.count()

    def __bool__(self) -> bool:
        return self.tokens > 0

    def add(self, text: WaitingText[GroupT, OwnerT]) -> None:
        """Let a text wait; it has at least one token."""
        assert text.tokens, "a text without tokens cannot wait"
        text.arrival = next(self._arrivals)
        self._groups.setdefault(text.group, _Group()).add(text)
        self.tokens += len(text.tokens)

    def remove(self, text: WaitingText[GroupT, OwnerT]) -> None:
        """Forget a text that nobody waits for any more; harmless where it is gone already."""
        if not text.gone:
            text.gone = True
            self.tokens -= len(text.tokens)

    def leader(self) -> GroupT:
        """Return the group that the next batch is of. Something waits."""
        group = self._oldest_group()
        assert group is not None, "nothing waits"
        oldest = group.oldest()
        assert oldest is not None
        return oldest.group

    def take(self, budget_tokens: int) -> list[WaitingText[GroupT, OwnerT]]:
        """Take the oldest text, then those nearest to it in length, within the budget.

        A text longer than the budget makes a batch alone. Empty when nothing waits.
        """
        group = self._oldest_group()
        if group is None:
            return []
        oldest = group.oldest()
        assert oldest is not None
        self.remove(oldest)
        length = len(oldest.tokens)
        batch = [oldest, *group.nearest(length, budget_tokens - length)]
        for text in batch[1:]:
            self.remove(text)
        return batch

    def _oldest_group(self) -> _Group[GroupT, OwnerT] | None:
        first: _Group[GroupT, OwnerT] | None = None
        arrival = -1
        for key, group in list(self._groups.items()):
            oldest = group.oldest()
            if oldest is None:
                del self._groups[key]  # nothing is left, not even of a retired student
            elif first is None or oldest.arrival < arrival:
                first, arrival = group, oldest.arrival
        return first


def _outwards(below: list[int], above: list[int], centre: int) -> Iterator[int]:
    """Merge two sorted lists into one order by distance from `centre`."""
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
