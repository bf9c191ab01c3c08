"""Continuous batching: combines texts of many requests within a token budget and runs them on lanes.

There is no batching window: a thread that becomes idle takes what was queued while it worked. A batch
starts with the oldest text and is filled with those closest to it in length. Everything except
`_compute` and `_encode` runs on the event loop, so no locks are needed.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from services.api.serving.active_models import ActiveModel, ActiveModels
from services.api.serving.batching.request_queue import QueuedText, RequestQueue
from services.api.serving.batching.thread_allocation import MIN_TOKENS_PER_THREAD, allocate
from services.api.serving.encoder import Encoded
from services.api.serving.errors import EngineFailed, Overloaded, PredictionError, RequestTooLarge
from services.api.serving.metrics import ServingMetrics
from services.api.serving.prediction import Prediction, Score, Timing, score_logits
from services.api.serving.settings import ServingSettings
from services.shared.datasets.text import Text, num_characters

# Tokenising costs about 0.1 ms per 500 characters; beyond this, a thread switch (0.05 ms) is cheaper
# than blocking the event loop.
MAX_INLINE_CHARACTERS = 2_000

# How many batches of one request may be queued, beyond one per lane: enough to keep the lanes busy,
# few enough that a list of thousands does not delay all other requests.
EXTRA_QUEUED_BATCHES = 1

# Batches that take less than this are not split: the GIL serialises the Python code of each batch.
MIN_SPLIT_SECONDS = 0.005

# Weight of the latest batch in the moving average of tokens per second.
RATE_SMOOTHING = 0.2

_Text = QueuedText[ActiveModel, "_Request"]


@dataclass(eq=False)
class _Request:
    model: ActiveModel
    encoded: list[Encoded]
    answer: asyncio.Future[list[Prediction]]
    tokenise_seconds: float
    arrived_at: float
    upcoming: deque[_Text] = field(default_factory=deque)  # not queued yet
    queued: set[_Text] = field(default_factory=set)
    results: dict[int, Prediction] = field(default_factory=dict)


@dataclass(eq=False)
class _Batch:
    model: ActiveModel
    texts: list[_Text]
    threads: int
    started_at: float

    @property
    def tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)


class Batcher:
    """Answers texts with the model that is active when they arrive."""

    def __init__(
        self,
        active_models: ActiveModels,
        settings: ServingSettings,
        *,
        metrics: ServingMetrics | None = None,
        tokens_per_second: float = 0.0,
    ) -> None:
        self._active_models = active_models
        self._settings = settings
        self._metrics = metrics or ServingMetrics()
        self._free_threads = settings.total_threads
        self._lanes = ThreadPoolExecutor(self._free_threads, thread_name_prefix="lane")
        self._tokenisers = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._queue: RequestQueue[ActiveModel, _Request] = RequestQueue()
        self._admitted_tokens = 0  # of all unanswered requests, including running ones
        self._tokens_per_second = tokens_per_second  # of one thread; 0 until measured
        self._dispatch_is_scheduled = False

    def close(self) -> None:
        """Stop the lanes after the running batches."""
        self._tokenisers.shutdown(cancel_futures=True)
        self._lanes.shutdown(cancel_futures=True)

    async def predict(
        self, texts: Sequence[Text], *, truncate: bool, alias: str = "default"
    ) -> list[Prediction]:
        """Return one prediction per text, in order, all by the same model.

        Cancelling the call drops the texts that have not started. Raises NoActiveModel, RefusedInput,
        Overloaded, EngineFailed.
        """
        model = self._active_models.lease(alias)
        try:
            started = time.perf_counter()
            encoded = await self._encode(model, texts, truncate=truncate)
            return await self._answer(model, encoded, started)
        finally:
            model.release()

    @property
    def queue_tokens(self) -> int:
        """Return the number of tokens of all unanswered requests."""
        return self._admitted_tokens

    async def _encode(
        self, model: ActiveModel, texts: Sequence[Text], *, truncate: bool
    ) -> list[Encoded]:
        if sum(map(num_characters, texts)) <= MAX_INLINE_CHARACTERS:
            return model.encoder.encode(texts, truncate=truncate)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._tokenisers, lambda: model.encoder.encode(texts, truncate=truncate)
        )

    async def _answer(
        self, model: ActiveModel, encoded: list[Encoded], started: float
    ) -> list[Prediction]:
        if not encoded:
            return []
        tokens = sum(len(text.tokens) for text in encoded)
        self._admit(tokens)
        now = time.perf_counter()
        loop = asyncio.get_running_loop()
        request = _Request(model, encoded, loop.create_future(), now - started, now)
        request.upcoming.extend(
            QueuedText(model, request, index, text.tokens) for index, text in enumerate(encoded)
        )
        self._admitted_tokens += tokens
        self._metrics.queue_tokens.set(self._admitted_tokens)
        self._enqueue_next(request)
        deadline = loop.call_later(self._settings.deadline_seconds, self._expire, request)
        try:
            predictions = await request.answer
        finally:
            deadline.cancel()
            self._dequeue(request)
            self._admitted_tokens -= tokens
            self._metrics.queue_tokens.set(self._admitted_tokens)
        self._metrics.record_answered(predictions)
        return predictions

    def _admit(self, tokens: int) -> None:
        """Raise RequestTooLarge or Overloaded if the request cannot be answered before its deadline."""
        limit = self._settings.queue_tokens
        if tokens > limit:
            raise RequestTooLarge(tokens, limit)
        wait = self._expected_wait_seconds()
        if self._admitted_tokens + tokens > limit or wait > self._settings.deadline_seconds:
            self._metrics.refused.inc()
            raise Overloaded(max(1.0, wait))

    def _expected_wait_seconds(self) -> float:
        """Return how long the admitted requests will take; 0 before the first measurement."""
        if self._tokens_per_second == 0:
            return 0.0
        return self._admitted_tokens / (self._tokens_per_second * self._settings.total_threads)

    def _enqueue_next(self, request: _Request) -> None:
        """Queue the next slice of a request; a long list re-enters at the back after each slice."""
        free_tokens = self._settings.batch_tokens * (self._settings.lanes + EXTRA_QUEUED_BATCHES)
        free_tokens -= sum(len(text.tokens) for text in request.queued)
        while request.upcoming and free_tokens > 0:
            text = request.upcoming.popleft()
            free_tokens -= len(text.tokens)
            request.queued.add(text)
            self._queue.add(text)
        if not self._dispatch_is_scheduled:
            # In the next loop iteration, so that requests that arrived together share a batch.
            self._dispatch_is_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_is_scheduled = False
        while self._queue:
            allocation = allocate(
                self._settings,
                free_threads=self._free_threads,
                queued_tokens=self._queue.tokens,
                may_split=self._may_split(self._queue.next_group()),
            )
            if allocation is None:
                return
            texts = self._queue.take(allocation.tokens)
            batch = _Batch(texts[0].group, texts, allocation.threads, time.perf_counter())
            # The requests hold references too, but a cancelled one releases its own before the batch ends.
            acquired = batch.model.acquire()
            assert acquired, "a queued request keeps its model open"
            self._free_threads -= batch.threads
            running = asyncio.get_running_loop().run_in_executor(self._lanes, _compute, batch)
            running.add_done_callback(functools.partial(self._finish, batch))

    def _may_split(self, model: ActiveModel) -> bool:
        """Return whether single-threaded batches may pay off for the next texts."""
        is_quick = self._tokens_per_second * MIN_SPLIT_SECONDS > MIN_TOKENS_PER_THREAD
        return model.engine.runs_on_cpu and not is_quick

    def _finish(self, batch: _Batch, done: asyncio.Future[list[dict[str, list[Score]]]]) -> None:
        batch.model.release()
        self._free_threads += batch.threads
        if done.cancelled():
            return  # the lanes were closed
        error = done.exception()
        if error is None:
            self._record(batch)
            self._deliver(batch, done.result())
        else:
            self._fail(batch, error)
        for request in {text.owner for text in batch.texts}:
            request.queued.difference_update(batch.texts)
            if request.upcoming and not request.answer.done():
                self._enqueue_next(request)
        self._dispatch()

    def _deliver(self, batch: _Batch, scores: list[dict[str, list[Score]]]) -> None:
        compute_seconds = time.perf_counter() - batch.started_at
        for text, by_head in zip(batch.texts, scores, strict=True):
            request = text.owner
            request.results[text.index] = Prediction(
                scores=by_head,
                tokens=len(text.tokens),
                truncated=request.encoded[text.index].truncated,
                model=batch.model.name,
                version=batch.model.version,
                timing=Timing(
                    request.tokenise_seconds, batch.started_at - request.arrived_at, compute_seconds
                ),
            )
            if len(request.results) == len(request.encoded) and not request.answer.done():
                request.answer.set_result(
                    [request.results[index] for index in range(len(request.encoded))]
                )

    def _fail(self, batch: _Batch, error: BaseException) -> None:
        if not isinstance(error, PredictionError):
            failure = EngineFailed(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            error = failure
        self._metrics.failed_batches.inc()
        for request in {text.owner for text in batch.texts}:
            if not request.answer.done():
                request.answer.set_exception(error)

    def _expire(self, request: _Request) -> None:
        if not request.answer.done():
            self._metrics.expired.inc()
            request.answer.set_exception(Overloaded(max(1.0, self._expected_wait_seconds())))

    def _dequeue(self, request: _Request) -> None:
        """Remove the texts of a request that have not started."""
        request.upcoming.clear()
        for text in request.queued:
            self._queue.remove(text)
        request.queued.clear()

    def _record(self, batch: _Batch) -> None:
        seconds = max(time.perf_counter() - batch.started_at, 1e-6)
        rate = batch.tokens / (seconds * batch.threads)
        if self._tokens_per_second == 0:
            self._tokens_per_second = rate
        self._tokens_per_second += RATE_SMOOTHING * (rate - self._tokens_per_second)
        lengths = [len(text.tokens) for text in batch.texts]
        padding = batch.model.engine.computed_tokens(lengths) - batch.tokens
        self._metrics.record_batch(lengths, padding=padding, seconds=seconds)


def _compute(batch: _Batch) -> list[dict[str, list[Score]]]:
    """Run one batch, on a thread of a lane."""
    model = batch.model
    logits = model.engine.run([text.tokens for text in batch.texts], threads=batch.threads)
    return score_logits(model.heads, model.calibration, logits)
