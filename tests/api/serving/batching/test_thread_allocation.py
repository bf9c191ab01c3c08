"""How many threads and tokens the next batch gets."""

import pytest

from services.api.serving.batching.thread_allocation import (
    MIN_TOKENS_PER_THREAD,
    ThreadAllocation,
    allocate,
)
from services.api.serving.settings import ServingSettings

TWO_LANES = ServingSettings(lanes=2, threads=4, batch_tokens=512)


def allocation(
    queued: int, *, free: int = 8, may_split: bool = True, settings: ServingSettings = TWO_LANES
) -> ThreadAllocation | None:
    return allocate(settings, free_threads=free, queued_tokens=queued, may_split=may_split)


def test_a_single_text_gets_all_threads_of_a_lane() -> None:
    assert allocation(40) == ThreadAllocation(threads=4, tokens=MIN_TOKENS_PER_THREAD)


def test_a_lane_splits_once_there_are_enough_tokens_for_every_free_thread() -> None:
    enough = 8 * MIN_TOKENS_PER_THREAD
    before, after = allocation(enough - 1), allocation(enough)
    assert (before, after) == (
        ThreadAllocation(4, enough // 2),
        ThreadAllocation(1, MIN_TOKENS_PER_THREAD),
    )


def test_a_single_idle_thread_does_not_wait_for_the_others() -> None:
    assert allocation(40, free=3) == ThreadAllocation(1, MIN_TOKENS_PER_THREAD)


@pytest.mark.parametrize(
    ("queued", "tokens"), [(8 * 512, 512), (8 * 512 + 8, 257), (8 * 300, 300), (100_000, 500)]
)
def test_queued_tokens_are_divided_evenly_among_threads(queued: int, tokens: int) -> None:
    assert allocation(queued) == ThreadAllocation(1, tokens)


def test_an_accelerator_uses_whole_lanes_and_waits_for_one() -> None:
    assert allocation(100_000, may_split=False) == ThreadAllocation(4, 511)
    assert allocation(100_000, free=3, may_split=False) is None


def test_nothing_is_allocated_while_every_thread_is_busy() -> None:
    assert allocation(100_000, free=0) is None


def test_small_batches_stay_small() -> None:
    small = ServingSettings(lanes=1, threads=1, batch_tokens=8)
    assert allocation(1000, free=1, settings=small) == ThreadAllocation(1, 8)
