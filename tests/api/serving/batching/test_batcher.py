"""How texts of many requests are batched, and how cancelled, late and excess ones are handled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from services.api.serving.active_models import ActiveModels
from services.api.serving.batching.batcher import Batcher
from services.api.serving.batching.thread_allocation import MIN_TOKENS_PER_THREAD
from services.api.serving.errors import (
    EngineFailed,
    NoActiveModel,
    Overloaded,
    RequestTooLarge,
    TextTooLong,
)
from services.api.serving.prediction import Prediction
from services.api.serving.settings import ServingSettings
from tests.api.serving.fakes import CountingEngine, make_student

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@contextmanager
def batcher_of(
    active_models: ActiveModels, *, tokens_per_second: float = 0.0, **limits: float
) -> Iterator[Batcher]:
    settings = ServingSettings.model_validate({"lanes": 1, "batch_tokens": 8, **limits})
    batcher = Batcher(active_models, settings, tokens_per_second=tokens_per_second)
    try:
        yield batcher
    finally:
        batcher.close()


async def until(condition: Callable[[], bool]) -> None:
    """Run the event loop until a condition holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition never became true")


async def block_lane(batcher: Batcher, engine: CountingEngine) -> asyncio.Task[list[Prediction]]:
    """Occupy the lane with a first text until `engine.open` is set."""
    engine.open.clear()
    first = asyncio.ensure_future(batcher.predict(["first"], truncate=False))
    await asyncio.to_thread(engine.running.wait, 20)
    return first


@pytest.fixture
def engine() -> CountingEngine:
    return CountingEngine()


@pytest.fixture
def active_models(engine: CountingEngine) -> ActiveModels:
    active_models = ActiveModels()
    active_models.swap("default", make_student(engine))
    return active_models


async def test_answers_are_in_the_order_of_the_texts(
    active_models: ActiveModels, engine: CountingEngine
) -> None:
    texts = ["a b c d e f", "a", "a b c", "a b", "a b c d e"]
    with batcher_of(active_models) as batcher:
        predictions = await batcher.predict(texts, truncate=False)
    assert [prediction.tokens for prediction in predictions] == [6, 1, 3, 2, 5]
    best = [prediction.scores["tone"][0] for prediction in predictions]
    assert [score.logit for score in best] == [6, 1, 3, 2, 5]
    assert {prediction.version for prediction in predictions} == {"v1"}


async def test_texts_queued_while_a_batch_runs_share_the_next_one(
    active_models: ActiveModels, engine: CountingEngine
) -> None:
    with batcher_of(active_models, batch_tokens=6) as batcher:
        first = await block_lane(batcher, engine)
        others = [
            asyncio.ensure_future(batcher.predict([text], truncate=False))
            for text in ("aa bb", "c c c c", "dd ee")
        ]
        await until(lambda: batcher.queue_tokens == 9)
        engine.open.set()
        await asyncio.gather(first, *others)
    assert [len(batch) for batch in engine.batches] == [1, 2, 1]
    assert engine.batches[1] == [[2, 2], [2, 2]]


async def test_requests_that_arrive_together_share_a_batch(
    active_models: ActiveModels, engine: CountingEngine
) -> None:
    with batcher_of(active_models) as batcher:
        await asyncio.gather(*(batcher.predict(["a b"], truncate=False) for _ in range(4)))
    assert [len(batch) for batch in engine.batches] == [4]


async def test_a_single_text_does_not_wait_for_the_whole_of_a_long_list(
    active_models: ActiveModels, engine: CountingEngine
) -> None:
    with batcher_of(active_models, batch_tokens=4) as batcher:
        first = await block_lane(batcher, engine)
        many = asyncio.ensure_future(batcher.predict(["a b c d"] * 50, truncate=False))
        await until(lambda: batcher.queue_tokens == 201)
        single = asyncio.ensure_future(batcher.predict(["x y z z"], truncate=False))
        await until(lambda: batcher.queue_tokens == 205)
        engine.open.set()
        await single
        batches_before_the_single_ended = len(engine.batches)
        assert len(await many) == 50
        await first
    assert batches_before_the_single_ended < 10


async def test_a_cancelled_request_is_never_computed(
    active_models: ActiveModels, engine: CountingEngine
) -> None:
    with batcher_of(active_models) as batcher:
        first = await block_lane(batcher, engine)
        cancelled = asyncio.ensure_future(batcher.predict(["b b b"] * 20, truncate=False))
        await until(lambda: batcher.queue_tokens == 61)
        cancelled.cancel()
        await asyncio.wait([cancelled])
        assert batcher.queue_tokens == 1
        engine.open.set()
        await first
    assert engine.batches == [[[5]]]


async def test_a_text_queued_past_its_deadline_is_dropped(
    active_models: ActiveModels, engine: CountingEngine
) -> None:
    with batcher_of(active_models, deadline_seconds=0.05) as batcher:
        first = await block_lane(batcher, engine)
        with pytest.raises(Overloaded) as refusal:
            await batcher.predict(["late"], truncate=False)
        assert refusal.value.retry_after_seconds >= 1
        with pytest.raises(Overloaded):
            await first
        engine.open.set()
    assert len(engine.batches) == 1


async def test_a_full_queue_refuses_and_recovers(
    active_models: ActiveModels, engine: CountingEngine
) -> None:
    with batcher_of(active_models, queue_tokens=10) as batcher:
        first = await block_lane(batcher, engine)
        second = asyncio.ensure_future(batcher.predict(["b b b b b b"], truncate=False))
        await until(lambda: batcher.queue_tokens == 7)
        with pytest.raises(Overloaded):
            await batcher.predict(["c c c c"], truncate=False)
        engine.open.set()
        await asyncio.gather(first, second)
        assert batcher.queue_tokens == 0
        assert await batcher.predict(["c c c c"], truncate=False)


async def test_a_request_larger_than_the_queue_is_too_large(active_models: ActiveModels) -> None:
    with batcher_of(active_models, queue_tokens=10) as batcher:
        with pytest.raises(RequestTooLarge) as refusal:
            await batcher.predict(["a b c d"] * 3, truncate=False)
        assert (refusal.value.tokens, refusal.value.limit) == (12, 10)


async def test_a_long_text_is_refused_or_truncated_as_requested(
    active_models: ActiveModels,
) -> None:
    with batcher_of(active_models) as batcher:
        with pytest.raises(TextTooLong) as refusal:
            await batcher.predict(["a", "b " * 33], truncate=False)
        assert (refusal.value.index, refusal.value.tokens, refusal.value.limit) == (1, 33, 32)
        [short, cut] = await batcher.predict(["a", "b " * 33], truncate=True)
        assert (short.truncated, cut.truncated, cut.tokens) == (False, True, 32)


async def test_a_failing_engine_fails_the_batch_and_not_the_batcher(
    active_models: ActiveModels,
) -> None:
    failing = [True]

    def fail_once() -> None:
        if failing.pop() if failing else False:
            raise RuntimeError("no memory")

    active_models.swap("default", make_student(CountingEngine(fail_once)))
    with batcher_of(active_models) as batcher:
        with pytest.raises(EngineFailed, match="no memory"):
            await batcher.predict(["a"], truncate=False)
        assert batcher.queue_tokens == 0
        assert len(await batcher.predict(["a"], truncate=False)) == 1


async def test_without_a_model_the_error_names_the_alias() -> None:
    with (
        batcher_of(ActiveModels()) as batcher,
        pytest.raises(NoActiveModel, match="challenger"),
    ):
        await batcher.predict(["a"], truncate=False, alias="challenger")


async def test_a_running_batch_finishes_on_the_model_it_started_with(
    active_models: ActiveModels, engine: CountingEngine
) -> None:
    previous = active_models.get()
    assert previous is not None
    with batcher_of(active_models) as batcher:
        first = await block_lane(batcher, engine)
        queued = asyncio.ensure_future(batcher.predict(["b"], truncate=False))
        await until(lambda: batcher.queue_tokens == 2)
        active_models.swap("default", make_student(CountingEngine(), version="v2"))
        later = asyncio.ensure_future(batcher.predict(["c"], truncate=False))
        await until(lambda: batcher.queue_tokens == 3)
        assert not engine.is_closed
        engine.open.set()
        answers = [(await each)[0].version for each in (first, queued, later)]
    assert answers == ["v1", "v1", "v2"]
    assert await asyncio.to_thread(previous.closed.wait, 20)
    assert engine.is_closed


async def test_a_cancelled_request_does_not_close_the_model_of_its_running_batch(
    active_models: ActiveModels, engine: CountingEngine
) -> None:
    previous = active_models.get()
    assert previous is not None
    with batcher_of(active_models) as batcher:
        first = await block_lane(batcher, engine)
        first.cancel()
        await asyncio.wait([first])
        active_models.swap("default", make_student(version="v2"))
        assert not engine.is_closed
        engine.open.set()
        assert await asyncio.to_thread(previous.closed.wait, 20)


async def test_lanes_run_batches_of_one_model_concurrently(
    active_models: ActiveModels, engine: CountingEngine
) -> None:
    with batcher_of(active_models, lanes=2, batch_tokens=1) as batcher:
        engine.open.clear()
        both = [asyncio.ensure_future(batcher.predict([text], truncate=False)) for text in "ab"]
        await until(lambda: len(engine.batches) == 2)
        engine.open.set()
        await asyncio.gather(*both)


@pytest.mark.parametrize(
    ("runs_on_cpu", "tokens_per_second", "threads"),
    [(True, 100.0, [2, 1, 1]), (False, 100.0, [2, 2]), (True, 1e12, [2, 2])],
)
async def test_a_lane_splits_if_enough_is_queued_on_a_cpu_that_is_not_too_fast(
    active_models: ActiveModels,
    engine: CountingEngine,
    runs_on_cpu: bool,
    tokens_per_second: float,
    threads: list[int],
) -> None:
    engine.runs_on_cpu = runs_on_cpu
    enough = ["a " * 31 + "a"] * (3 * MIN_TOKENS_PER_THREAD // 32)

    with batcher_of(
        active_models,
        threads=2,
        batch_tokens=2 * MIN_TOKENS_PER_THREAD,
        tokens_per_second=tokens_per_second,
    ) as batcher:
        first = await block_lane(batcher, engine)
        rest = [asyncio.ensure_future(batcher.predict([text], truncate=False)) for text in enough]
        await until(lambda: batcher.queue_tokens == 1 + 3 * MIN_TOKENS_PER_THREAD)
        engine.open.set()
        await asyncio.gather(first, *rest)
    assert engine.threads[: len(threads)] == threads
