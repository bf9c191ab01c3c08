"""Solve for the tokens of a micro-batch at which a timeline prints the numbers of a message.

A moment prints the message if it requests the printed bytes with the printed bytes allocated and no
earlier moment was higher than the two together: a device that held an earlier, higher moment would
not have refused this one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from services.shared.memory.forensics.matching.rounding import Rounding
from services.shared.memory.oom_log.message_parser import PrintedSize
from services.shared.memory.planning.ledger import PlanPhase, Point
from services.shared.memory.sizes import MIB

# Usual sizes of a micro-batch in tokens; far below a rank idles.
TOKENS_GRID = (64, 512, 1024, 2048, 4096, 8192, 16384)
TYPICAL_TOKENS = 2048
_SECANT_STEPS = 4
_MOST_SOLUTIONS = 4
# Between two computed numbers of tokens the highest earlier point is interpolated. It is convex and
# piecewise linear in them: what is this far above the limit at both ends is above it in between.
_CLEARLY_ABOVE = 1.02
_SEGMENT_STEP = 2 * MIB  # large requests are rounded up to multiples of it
_COARSEST_ROUNDING = 20 * MIB  # the allocator's rounding adds less than a large segment


class MomentKey(NamedTuple):
    """The identity of a moment across numbers of tokens."""

    step: int
    micro_batch: int
    phase: PlanPhase
    layer: int | None
    what: str
    ordinal: int = 0  # of moments alike: the update visits a tensor of every layer


class MomentBytes(NamedTuple):
    """Bytes of one moment: allocated, requested, and the highest live bytes before it."""

    allocated: int
    request: int
    before: int


@dataclass(frozen=True)
class Solution:
    """A moment that prints the message, and the tokens for which it does.

    `tokens` is None where the moment is the same for every number of them.
    """

    tokens: int | None
    key: MomentKey
    held: MomentBytes


Moments = dict[MomentKey, MomentBytes]
MomentsAt = Callable[[int], Moments]


def printed_moments(
    timeline: Iterable[Point], requested: PrintedSize, rounding: Rounding
) -> Moments:
    """Return the moments of a job's timeline that print the request `requested`."""
    least = requested.size_bytes - requested.tolerance_bytes - _COARSEST_ROUNDING
    most = requested.size_bytes + requested.tolerance_bytes
    found: Moments = {}
    seen: Counter[MomentKey] = Counter()
    before = 0
    for point in timeline:
        if point.phase in (PlanPhase.EVALUATION, PlanPhase.EXPORT):
            break
        for moment in point.maxima:
            live, request = point.base_bytes + moment.live_bytes, moment.request_bytes
            if least <= request <= most and requested.covers(rounding.driver_request(request)):
                key = MomentKey(
                    point.step, point.micro_batch, point.phase, point.layer, moment.what
                )
                found[key._replace(ordinal=seen[key])] = MomentBytes(
                    live - request, request, before
                )
                seen[key] += 1
            before = max(before, live)
    return found


def scaling_grids(
    one: Iterable[Point], double: Iterable[Point], requested: PrintedSize, *, most: int
) -> list[tuple[int, int]]:
    """Return the ranges of tokens in which some activation prints the request `requested`.

    `one` and `double` are timelines at `TYPICAL_TOKENS` and at twice as many: what only one of them
    requests depends on the tokens, in proportion.
    """
    scaling = _requests(one) - _requests(double)
    least = requested.size_bytes - requested.tolerance_bytes - _SEGMENT_STEP
    grids = set()
    for request in scaling:
        low = max(1, least * TYPICAL_TOKENS // request + 1)
        high = (requested.size_bytes + requested.tolerance_bytes) * TYPICAL_TOKENS // request
        if TOKENS_GRID[0] <= high <= most and low <= high:
            grids.add((low, high))
    return sorted(grids)


def _requests(timeline: Iterable[Point]) -> set[int]:
    return {
        moment.request_bytes
        for point in timeline
        if point.phase in (PlanPhase.FORWARD, PlanPhase.BACKWARD)
        for moment in point.maxima
        if moment.request_bytes
    }


def find_tokens(
    moments_at: MomentsAt, grid: Sequence[int], allocated: PrintedSize
) -> list[Solution]:
    """Return the moments that print the message, those of usual numbers of tokens first."""
    lowest, highest = moments_at(grid[0]), moments_at(grid[-1])
    solutions: dict[tuple[int | None, int | None, int], Solution] = {}
    for key in _within_reach(lowest, highest, grid, allocated):
        found = _constant(key, moments_at, grid, allocated)
        if found is None:
            tokens = _tokens_for(key, moments_at, grid, allocated)
            found = Solution(tokens, key, moments_at(tokens)[key]) if tokens else None
        if found and found.held.before < _limit(found.held, allocated):
            # The same moment of a later step or micro-batch has the same layer and tokens.
            solutions.setdefault((found.tokens, key.layer, key.ordinal), found)
        if len(solutions) == _MOST_SOLUTIONS:
            break
    return sorted(solutions.values(), key=_distance_from_typical)


def _distance_from_typical(solution: Solution) -> int:
    return 0 if solution.tokens is None else abs(solution.tokens - TYPICAL_TOKENS)


def _constant(
    key: MomentKey, moments_at: MomentsAt, grid: Sequence[int], allocated: PrintedSize
) -> Solution | None:
    """Return the moment where its bytes do not depend on the tokens, as those of the update."""
    lowest, highest = moments_at(grid[0])[key], moments_at(grid[-1]).get(key)
    if highest is None or highest.allocated != lowest.allocated:
        return None
    return Solution(None, key, lowest) if allocated.covers(lowest.allocated) else None


def _limit(held: MomentBytes, allocated: PrintedSize) -> int:
    return allocated.size_bytes + allocated.tolerance_bytes + held.request


def _within_reach(
    lowest: Moments, highest: Moments, grid: Sequence[int], allocated: PrintedSize
) -> list[MomentKey]:
    """Return the moments that may reach `allocated` for some number of tokens.

    What is alive only grows with the tokens: a moment above the target with the fewest, below it
    with the most, or behind a higher point with the fewest, never prints the message.
    """
    target, slack = allocated.size_bytes, allocated.tolerance_bytes
    reachable: list[tuple[float, int, MomentKey]] = []
    for key, held in lowest.items():
        most = highest[key].allocated if key in highest else target
        if held.allocated > target + slack or most < target - slack:
            continue
        if held.before < _limit(held, allocated):
            share = (target - held.allocated) / max(1, most - held.allocated)
            estimate = grid[0] + share * (grid[-1] - grid[0])
            reachable.append((abs(estimate - TYPICAL_TOKENS), key.step, key))
    return [key for *_, key in sorted(reachable, key=lambda entry: entry[:2])]


def _tokens_for(
    key: MomentKey, moments_at: MomentsAt, grid: Sequence[int], allocated: PrintedSize
) -> int | None:
    known = [(tokens, moments_at(tokens)[key]) for tokens in grid if key in moments_at(tokens)]
    for low, high in pairwise(known):
        tokens = _between(key, moments_at, low, high, allocated)
        if tokens is not None:
            return tokens
    return next((tokens for tokens, held in known if allocated.covers(held.allocated)), None)


def _between(
    key: MomentKey,
    moments_at: MomentsAt,
    low: tuple[int, MomentBytes],
    high: tuple[int, MomentBytes],
    allocated: PrintedSize,
) -> int | None:
    """Search between two numbers of tokens by secants: a moment's bytes are near linear in them."""
    target = allocated.size_bytes
    for _ in range(_SECANT_STEPS):
        (fewer, below), (more, above) = low, high
        if not below.allocated < target < above.allocated:
            return None
        share = (target - below.allocated) / (above.allocated - below.allocated)
        limit = _limit(below, allocated)
        before = below.before + share * (above.before - below.before)
        if below.before >= limit or before > _CLEARLY_ABOVE * limit:
            return None
        tokens = round(fewer + share * (more - fewer))
        if key not in moments_at(tokens):
            return None
        middle = (tokens, moments_at(tokens)[key])
        if allocated.covers(middle[1].allocated):
            return tokens
        low, high = (middle, high) if middle[1].allocated < target else (low, middle)
    return None
