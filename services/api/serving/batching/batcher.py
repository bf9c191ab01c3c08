"""Gathers texts of many requests into batches within a budget of tokens, and runs them on lanes.

There is no waiting window: a thread that falls idle takes what has gathered while it worked. The
oldest text leads a batch, the nearest lengths fill it. Everything but `_compute` and `_encode` runs
on the event loop, so nothing here needs a lock.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from services.api.serving.active_models import ActiveStudent, Slot
from services.api.serving.batching.request_queue import WaitingText, WaitingTexts
from services.api.serving.batching.thread_allocation import ENOUGH_TOKENS, next_share
from services.api.serving.encoder import Encoded
from services.api.serving.errors import EngineFailed, Overloaded, PredictionError, RequestTooLarge
from services.api.serving.metrics import Measures
from services.api.serving.prediction import Prediction, Score, Timing, read_scores
from services.api.serving.settings import ServingSettings

# Tokenising costs about 0.1 ms per 500 characters; beyond this, a thread hop (0.05 ms) is cheaper
# than the event loop standing still.
INLINE_CHARACTERS = 2_000

# How many batches of one request may wait at once, beyond one a lane: enough to keep lanes busy,
# few enough that a list of thousands does not stand in front of everybody else.
SLICES_AHEAD = 1

# A batch that takes less is not split: Python runs one thread at a time, and more batches are more of it.
QUICK_SECONDS = 0.005

# Weight of the newest batch in the moving average of tokens a second.
RATE_SMOOTHING = 0.2

Text = WaitingText[ActiveStudent, "_Request"]


@dataclass(eq=False)
class _Request:
    student: ActiveStudent
    encoded: list[Encoded]
    answer: asyncio.Future[list[Prediction]]
    tokenise_seconds: float
    arrived: float
    upcoming: deque[Text] = field(default_factory=deque)  # not in the queue yet
    queued: set[Text] = field(default_factory=set)
    results: dict[int, Prediction] = field(default_factory=dict)


@dataclass(eq=False)
class _Batch:
    student: ActiveStudent
    texts: list[Text]
    threads: int
    taken: float

    @property
    def tokens(self) -> int:
        return sum(len(text.tokens) for text in self.texts)


class Batcher:
    """Answers texts with the student that is active when they arrive."""

    def __init__(
        self, slot: Slot, settings: ServingSettings, *, measures: Measures | None = None
    ) -> None:
        self._slot = slot
        self._settings = settings
        self._measures = measures or Measures()
        self._free_threads = settings.all_threads
        self._lanes = ThreadPoolExecutor(self._free_threads, thread_name_prefix="lane")
        self._tokenisers = ThreadPoolExecutor(1, thread_name_prefix="tokenise")
        self._waiting: WaitingTexts[ActiveStudent, _Request] = WaitingTexts()
        self._admitted_tokens = 0  # of every request that is not answered yet, running ones too
        self._tokens_per_second = 0.0  # of one thread; 0 until measured
        self._pump_is_due = False

    def close(self) -> None:
        """Stop the lanes once what runs has ended."""
        self._tokenisers.shutdown(cancel_futures=True)
        self._lanes.shutdown(cancel_futures=True)

    async def predict(
        self, texts: Sequence[str], *, truncate: bool, alias: str = "default"
    ) -> list[Prediction]:
        """Return one prediction a text, in order, all by the same student.

        Cancelling the call drops the texts that have not started. Raises NoStudent, RefusedInput,
        Overloaded, EngineFailed.
        """
        student = self._slot.lease(alias)
        try:
            started = time.perf_counter()
            encoded = await self._encode(student, texts, truncate=truncate)
            return await self._answer(student, encoded, started)
        finally:
            student.release()

    @property
    def queue_tokens(self) -> int:
        """Return the tokens of all requests that are not answered yet."""
        return self._admitted_tokens

    async def _encode(
        self, student: ActiveStudent, texts: Sequence[str], *, truncate: bool
    ) -> list[Encoded]:
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return student.encoder.encode(texts, truncate=truncate)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._tokenisers, lambda: student.encoder.encode(texts, truncate=truncate)
        )

    async def _answer(
        self, student: ActiveStudent, encoded: list[Encoded], started: float
    ) -> list[Prediction]:
        if not encoded:
            return []
        tokens = sum(len(text.tokens) for text in encoded)
        self._admit(tokens)
        now = time.perf_counter()
        loop = asyncio.get_running_loop()
        request = _Request(student, encoded, loop.create_future(), now - started, now)
        request.upcoming.extend(
            WaitingText(student, request, index, text.tokens) for index, text in enumerate(encoded)
        )
        self._admitted_tokens += tokens
        self._measures.queue_tokens.set(self._admitted_tokens)
        self._queue_more(request)
        deadline = loop.call_later(self._settings.deadline_seconds, self._expire, request)
        try:
            predictions = await request.answer
        finally:
            deadline.cancel()
            self._drop(request)
            self._admitted_tokens -= tokens
            self._measures.queue_tokens.set(self._admitted_tokens)
        self._measures.answered(predictions)
        return predictions

    def _admit(self, tokens: int) -> None:
        """Refuse what cannot be answered before its deadline."""
        limit = self._settings.queue_tokens
        if tokens > limit:
            raise RequestTooLarge(tokens, limit)
        wait = self._wait_seconds()
        if self._admitted_tokens + tokens > limit or wait > self._settings.deadline_seconds:
            self._measures.refused.inc()
            raise Overloaded(max(1.0, wait))

    def _wait_seconds(self) -> float:
        """Return how long what is admitted will take; 0 where nothing was measured yet."""
        if self._tokens_per_second == 0:
            return 0.0
        return self._admitted_tokens / (self._tokens_per_second * self._settings.all_threads)

    def _queue_more(self, request: _Request) -> None:
        """Let the next slice of a request wait. A long list goes to the back after each slice."""
        room = self._settings.batch_tokens * (self._settings.lanes + SLICES_AHEAD)
        room -= sum(len(text.tokens) for text in request.queued)
        while request.upcoming and room > 0:
            text = request.upcoming.popleft()
            room -= len(text.tokens)
            request.queued.add(text)
            self._waiting.add(text)
        if not self._pump_is_due:
            # After this turn of the loop, so that requests that arrived together share a batch.
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        while self._waiting:
            share = next_share(
                self._settings,
                free_threads=self._free_threads,
                waiting_tokens=self._waiting.tokens,
                may_split=self._may_split(self._waiting.leader()),
            )
            if share is None:
                return
            texts = self._waiting.take(share.tokens)
            batch = _Batch(texts[0].group, texts, share.threads, time.perf_counter())
            # The requests hold the student too, but a cancelled one lets go before its batch ends.
            assert batch.student.hold(), "a waiting request holds its student"
            self._free_threads -= batch.threads
            running = asyncio.get_running_loop().run_in_executor(self._lanes, _compute, batch)
            running.add_done_callback(functools.partial(self._finish, batch))

    def _may_split(self, student: ActiveStudent) -> bool:
        """Say whether batches of one thread each are worth it for what comes next."""
        quick = self._tokens_per_second * QUICK_SECONDS > ENOUGH_TOKENS
        return student.engine.on_processor and not quick

    def _finish(self, batch: _Batch, done: asyncio.Future[list[dict[str, list[Score]]]]) -> None:
        batch.student.release()
        self._free_threads += batch.threads
        if done.cancelled():
            return  # the lanes were closed
        error = done.exception()
        if error is None:
            self._measure(batch)
            self._hand_out(batch, done.result())
        else:
            self._fail(batch, error)
        for request in {text.owner for text in batch.texts}:
            request.queued.difference_update(batch.texts)
            if request.upcoming and not request.answer.done():
                self._queue_more(request)
        self._pump()

    def _hand_out(self, batch: _Batch, scores: list[dict[str, list[Score]]]) -> None:
        compute = time.perf_counter() - batch.taken
        for text, by_head in zip(batch.texts, scores, strict=True):
            request = text.owner
            request.results[text.index] = Prediction(
                scores=by_head,
                tokens=len(text.tokens),
                truncated=request.encoded[text.index].truncated,
                model=batch.student.name,
                version=batch.student.version,
                timing=Timing(request.tokenise_seconds, batch.taken - request.arrived, compute),
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
        self._measures.failed_batches.inc()
        for request in {text.owner for text in batch.texts}:
            if not request.answer.done():
                request.answer.set_exception(error)

    def _expire(self, request: _Request) -> None:
        if not request.answer.done():
            self._measures.expired.inc()
            request.answer.set_exception(Overloaded(max(1.0, self._wait_seconds())))

    def _drop(self, request: _Request) -> None:
        """Take what is left of a request out of the queue, before it costs anything."""
        request.upcoming.clear()
        for text in request.queued:
            self._waiting.remove(text)
        request.queued.clear()

    def _measure(self, batch: _Batch) -> None:
        seconds = max(time.perf_counter() - batch.taken, 1e-6)
        rate = batch.tokens / (seconds * batch.threads)
        if self._tokens_per_second == 0:
            self._tokens_per_second = rate
        self._tokens_per_second += RATE_SMOOTHING * (rate - self._tokens_per_second)
        lengths = [len(text.tokens) for text in batch.texts]
        padding = batch.student.engine.computed_tokens(lengths) - batch.tokens
        self._measures.batch(lengths, padding=padding, seconds=seconds)


def _compute(batch: _Batch) -> list[dict[str, list[Score]]]:
    """Run one batch; called on a lane."""
    student = batch.student
    logits = student.engine.run([text.tokens for text in batch.texts], threads=batch.threads)
    return read_scores(student.heads, student.calibration, logits)
