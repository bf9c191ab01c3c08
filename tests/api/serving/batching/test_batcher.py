"""How texts of many requests become batches, and what becomes of those that cannot wait."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
from services.api.serving.settings import ServingSettings


@contextmanager
def batcher_of(active_models: ActiveModels, **limits: Any) -> Iterator[Batcher]:
    batcher = Batcher(active_models, ServingSettings(**{"lanes": 1, "batch_tokens": 8, **limits}))
    try:
        yield batcher
    finally:
        batcher.close()


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something holds."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("never came true")


async def hold_up(batcher: Batcher, engine: Any) -> "asyncio.Task[Any]":
    """Let a first text occupy the lane until `engine.open` is set."""
    engine.open.clear()
    first = asyncio.ensure_future(batcher.predict(["first"], truncate=False))
    await asyncio.to_thread(engine.running.wait, 20)
    return first


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(bounded())


@pytest.fixture
def engine(new_engine: Any) -> Any:
    return new_engine()


@pytest.fixture
def active_models(new_student: Any, engine: Any) -> ActiveModels:
    active_models = ActiveModels()
    active_models.swap("default", new_student(engine))
    return active_models


def test_answers_come_in_the_order_of_the_texts(active_models: ActiveModels, engine: Any) -> None:
    async def test() -> None:
        texts = ["a b c d e f", "a", "a b c", "a b", "a b c d e"]
        with batcher_of(active_models) as batcher:
            predictions = await batcher.predict(texts, truncate=False)
        assert [prediction.tokens for prediction in predictions] == [6, 1, 3, 2, 5]
        best = [prediction.scores["tone"][0] for prediction in predictions]
        assert [score.logit for score in best] == [6, 1, 3, 2, 5]
        assert {prediction.version for prediction in predictions} == {"v1"}

    run(test)


def test_texts_that_gather_while_a_batch_runs_share_the_next_one(
    active_models: ActiveModels, engine: Any
) -> None:
    async def test() -> None:
        with batcher_of(active_models, batch_tokens=6) as batcher:
            first = await hold_up(batcher, engine)
            others = [
                asyncio.ensure_future(batcher.predict([text], truncate=False))
                for text in ("aa bb", "c c c c", "dd ee")
            ]
            await until(lambda: batcher.queue_tokens == 9)
            engine.open.set()
            await asyncio.gather(first, *others)
        assert [len(batch) for batch in engine.batches] == [1, 2, 1]
        assert engine.batches[1] == [[2, 2], [2, 2]]

    run(test)


def test_requests_that_arrive_together_share_a_batch(
    active_models: ActiveModels, engine: Any
) -> None:
    async def test() -> None:
        with batcher_of(active_models) as batcher:
            await asyncio.gather(*(batcher.predict(["a b"], truncate=False) for _ in range(4)))
        assert [len(batch) for batch in engine.batches] == [4]

    run(test)


def test_a_single_text_does_not_wait_behind_the_whole_of_a_long_list(
    active_models: ActiveModels, engine: Any
) -> None:
    async def test() -> None:
        with batcher_of(active_models, batch_tokens=4) as batcher:
            first = await hold_up(batcher, engine)
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

    run(test)


def test_a_cancelled_request_costs_the_engine_nothing(
    active_models: ActiveModels, engine: Any
) -> None:
    async def test() -> None:
        with batcher_of(active_models) as batcher:
            first = await hold_up(batcher, engine)
            unwanted = asyncio.ensure_future(batcher.predict(["b b b"] * 20, truncate=False))
            await until(lambda: batcher.queue_tokens == 61)
            unwanted.cancel()
            await asyncio.wait([unwanted])
            assert batcher.queue_tokens == 1
            engine.open.set()
            await first
        assert engine.batches == [[[5]]]

    run(test)


def test_a_text_that_waits_past_its_deadline_is_given_up(
    active_models: ActiveModels, engine: Any
) -> None:
    async def test() -> None:
        with batcher_of(active_models, deadline_seconds=0.05) as batcher:
            first = await hold_up(batcher, engine)
            with pytest.raises(Overloaded) as refusal:
                await batcher.predict(["late"], truncate=False)
            assert refusal.value.retry_after_seconds >= 1
            with pytest.raises(Overloaded):
                await first
            engine.open.set()
        assert len(engine.batches) == 1

    run(test)


def test_a_full_queue_refuses_and_recovers(active_models: ActiveModels, engine: Any) -> None:
    async def test() -> None:
        with batcher_of(active_models, queue_tokens=10) as batcher:
            first = await hold_up(batcher, engine)
            second = asyncio.ensure_future(batcher.predict(["b b b b b b"], truncate=False))
            await until(lambda: batcher.queue_tokens == 7)
            with pytest.raises(Overloaded):
                await batcher.predict(["c c c c"], truncate=False)
            engine.open.set()
            await asyncio.gather(first, second)
            assert batcher.queue_tokens == 0
            assert await batcher.predict(["c c c c"], truncate=False)

    run(test)


def test_a_request_that_the_queue_can_never_hold_is_told_so(active_models: ActiveModels) -> None:
    async def test() -> None:
        with batcher_of(active_models, queue_tokens=10) as batcher:
            with pytest.raises(RequestTooLarge) as refusal:
                await batcher.predict(["a b c d"] * 3, truncate=False)
            assert (refusal.value.tokens, refusal.value.limit) == (12, 10)

    run(test)


def test_a_long_text_is_refused_or_truncated_as_asked(active_models: ActiveModels) -> None:
    async def test() -> None:
        with batcher_of(active_models) as batcher:
            with pytest.raises(TextTooLong) as refusal:
                await batcher.predict(["a", "b " * 33], truncate=False)
            assert (refusal.value.index, refusal.value.tokens, refusal.value.limit) == (1, 33, 32)
            [short, cut] = await batcher.predict(["a", "b " * 33], truncate=True)
            assert (short.truncated, cut.truncated, cut.tokens) == (False, True, 32)

    run(test)


def test_a_failing_engine_fails_the_batch_and_not_the_batcher(
    active_models: ActiveModels, new_engine: Any, new_student: Any
) -> None:
    failing = [True]

    def fail_once() -> None:
        if failing.pop() if failing else False:
            raise RuntimeError("no memory")

    async def test() -> None:
        active_models.swap("default", new_student(new_engine(fail_once)))
        with batcher_of(active_models) as batcher:
            with pytest.raises(EngineFailed, match="no memory"):
                await batcher.predict(["a"], truncate=False)
            assert batcher.queue_tokens == 0
            assert len(await batcher.predict(["a"], truncate=False)) == 1

    run(test)


def test_without_a_student_the_alias_is_named() -> None:
    async def test() -> None:
        with (
            batcher_of(ActiveModels()) as batcher,
            pytest.raises(NoActiveModel, match="challenger"),
        ):
            await batcher.predict(["a"], truncate=False, alias="challenger")

    run(test)


def test_a_running_batch_ends_on_the_student_it_began_with(
    active_models: ActiveModels, engine: Any, new_engine: Any, new_student: Any
) -> None:
    async def test() -> None:
        former = active_models.get()
        assert former is not None
        with batcher_of(active_models) as batcher:
            first = await hold_up(batcher, engine)
            queued = asyncio.ensure_future(batcher.predict(["b"], truncate=False))
            await until(lambda: batcher.queue_tokens == 2)
            active_models.swap("default", new_student(new_engine(), version="v2"))
            later = asyncio.ensure_future(batcher.predict(["c"], truncate=False))
            await until(lambda: batcher.queue_tokens == 3)
            assert not engine.is_closed
            engine.open.set()
            answers = [(await each)[0].version for each in (first, queued, later)]
        assert answers == ["v1", "v1", "v2"]
        assert await asyncio.to_thread(former.closed.wait, 20)
        assert engine.is_closed

    run(test)


def test_a_cancelled_request_does_not_close_the_student_under_its_running_batch(
    active_models: ActiveModels, engine: Any, new_student: Any
) -> None:
    async def test() -> None:
        former = active_models.get()
        assert former is not None
        with batcher_of(active_models) as batcher:
            first = await hold_up(batcher, engine)
            first.cancel()
            await asyncio.wait([first])
            active_models.swap("default", new_student(version="v2"))
            assert not engine.is_closed
            engine.open.set()
            assert await asyncio.to_thread(former.closed.wait, 20)

    run(test)


def test_lanes_run_batches_of_one_student_at_once(active_models: ActiveModels, engine: Any) -> None:
    async def test() -> None:
        with batcher_of(active_models, lanes=2, batch_tokens=1) as batcher:
            engine.open.clear()
            both = [asyncio.ensure_future(batcher.predict([text], truncate=False)) for text in "ab"]
            await until(lambda: len(engine.batches) == 2)
            engine.open.set()
            await asyncio.gather(*both)

    run(test)


@pytest.mark.parametrize(
    ("runs_on_cpu", "tokens_per_second", "threads"),
    [(True, 100.0, [2, 1, 1]), (False, 100.0, [2, 2]), (True, 1e12, [2, 2])],
)
def test_a_lane_splits_where_enough_waits_on_a_processor_that_takes_its_time(
    active_models: ActiveModels,
    engine: Any,
    runs_on_cpu: bool,
    tokens_per_second: float,
    threads: list[int],
) -> None:
    engine.runs_on_cpu = runs_on_cpu
    enough = ["a " * 31 + "a"] * (3 * MIN_TOKENS_PER_THREAD // 32)

    async def test() -> None:
        with batcher_of(
            active_models, threads=2, batch_tokens=2 * MIN_TOKENS_PER_THREAD
        ) as batcher:
            first = await hold_up(batcher, engine)
            rest = [
                asyncio.ensure_future(batcher.predict([text], truncate=False)) for text in enough
            ]
            await until(lambda: batcher.queue_tokens == 1 + 3 * MIN_TOKENS_PER_THREAD)
            batcher._tokens_per_second = tokens_per_second
            engine.open.set()
            await asyncio.gather(first, *rest)
        assert engine.threads[: len(threads)] == threads

    run(test)
