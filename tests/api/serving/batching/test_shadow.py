"""A second student that answers a share of the traffic, seen by nobody."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.api.serving.active_models import ActiveModels
from services.api.serving.batching.batcher import Batcher
from services.api.serving.batching.shadow import Shadow
from services.api.serving.metrics import ServingMetrics
from services.api.serving.settings import ServingSettings

Parts = tuple[ActiveModels, Batcher, Callable[[float], Shadow], CollectorRegistry]


@pytest.fixture
def parts(new_student: Any) -> Iterator[Parts]:
    active_models, registry = ActiveModels(), CollectorRegistry()
    active_models.swap("default", new_student())
    active_models.swap("challenger", new_student(version="v2"))
    settings = ServingSettings(lanes=1, batch_tokens=8)
    metrics = ServingMetrics(registry)
    batcher = Batcher(active_models, settings, metrics=metrics)

    def shadow(share: float) -> Shadow:
        sharing = settings.model_copy(update={"shadow_share": share})
        return Shadow(active_models, batcher, sharing, metrics=metrics)

    yield active_models, batcher, shadow, registry
    batcher.close()


def counted(registry: CollectorRegistry, head: str, agrees: str) -> float:
    name = "stillhouse_serving_shadow_answers_total"
    return registry.get_sample_value(name, {"head": head, "agrees": agrees}) or 0.0


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 30)

    asyncio.run(bounded())


def test_a_share_of_requests_is_compared_head_by_head(parts: Parts) -> None:
    _, batcher, new_shadow, registry = parts

    async def test() -> None:
        shadow = new_shadow(0.5)
        for _ in range(4):
            answers = await batcher.predict(["a b c", "ffff"], truncate=False)
            shadow.mirror(["a b c", "ffff"], answers, truncate=False, alias="default")
            await shadow.drain()

    run(test)
    assert counted(registry, "tone", "true") == 4  # two of four requests, two texts each
    assert counted(registry, "topics", "true") == 4
    assert counted(registry, "tone", "false") == 0


def test_disagreement_is_counted_as_such(parts: Parts) -> None:
    _, batcher, new_shadow, registry = parts

    async def test() -> None:
        shadow = new_shadow(1.0)
        other = await batcher.predict(["ffff"], truncate=False)  # decides otherwise than "a b c"
        shadow.mirror(["a b c"], other, truncate=False, alias="default")
        await shadow.drain()

    run(test)
    assert counted(registry, "tone", "false") == 1


@pytest.mark.parametrize("case", ["no share", "asked itself", "nobody there"])
def test_the_shadow_stays_out_where_it_has_no_business(parts: Parts, case: str) -> None:
    active_models, batcher, new_shadow, registry = parts

    async def test() -> None:
        shadow = new_shadow(0.0 if case == "no share" else 1.0)
        if case == "nobody there":
            active_models.swap("challenger", None)
        answers = await batcher.predict(["a"], truncate=False)
        alias = "challenger" if case == "asked itself" else "default"
        shadow.mirror(["a"], answers, truncate=False, alias=alias)
        await shadow.drain()

    run(test)
    assert counted(registry, "tone", "true") == 0


def test_a_shadow_that_fails_costs_nobody_anything(
    parts: Parts, new_engine: Any, new_student: Any
) -> None:
    active_models, batcher, new_shadow, registry = parts

    def fail() -> None:
        raise RuntimeError("broken challenger")

    async def test() -> None:
        active_models.swap("challenger", new_student(new_engine(fail)))
        shadow = new_shadow(1.0)
        answers = await batcher.predict(["a"], truncate=False)
        shadow.mirror(["a"], answers, truncate=False, alias="default")
        await shadow.drain()

    run(test)
    assert counted(registry, "tone", "true") == 0
