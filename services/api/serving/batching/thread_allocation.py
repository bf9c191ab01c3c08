"""How CPU threads are allocated to batches. Pure and torch-free.

One batch on several threads gives a single text the lowest latency, but its threads synchronise after
every matrix product. With enough texts queued for every thread, one batch per thread has no such cost:
1.15 times the requests per second in 8 bits (two cores, Qwen3-0.6B's shape).
"""

from __future__ import annotations

from dataclasses import dataclass

from services.api.serving.settings import ServingSettings

# Above this a matrix product's time grows with its tokens; below, reading the weights dominates.
MIN_TOKENS_PER_THREAD = 128


@dataclass(frozen=True)
class ThreadAllocation:
    """The resources of the next batch."""

    threads: int
    tokens: int


def allocate(
    settings: ServingSettings, *, free_threads: int, queued_tokens: int, may_split: bool
) -> ThreadAllocation | None:
    """Return the threads and tokens of the next batch, None if it has to wait for a thread.

    `queued_tokens` is at least 1.

    A lane runs one batch on all its threads, or splits into one batch per thread when there are enough
    tokens for each free thread. Nothing in between, as compiled code is specialised on the number of
    threads. The queued tokens are divided evenly, so that all threads finish at the same time.
    """
    threads = settings.threads
    if may_split and (
        free_threads < threads or queued_tokens >= free_threads * MIN_TOKENS_PER_THREAD
    ):
        threads = 1
    if free_threads < threads:
        return None
    batches = settings.total_threads // threads
    rounds = -(-queued_tokens // (settings.batch_tokens * batches))
    tokens = -(-queued_tokens // (rounds * batches))
    return ThreadAllocation(threads, min(settings.batch_tokens, max(tokens, MIN_TOKENS_PER_THREAD)))
