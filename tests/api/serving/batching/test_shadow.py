"""Shadow traffic: a second model answers a share of the requests, without effect on clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry

from services.api.serving.active_models import ActiveModels
from services.api.serving.batching.batcher import Batcher
from services.api.serving.batching.shadow import Shadow
from services.api.serving.metrics import ServingMetrics
from services.api.serving.settings import ServingSettings
from tests.api.serving.fakes import CountingEngine, make_student

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

Parts = tuple[ActiveModels, Batcher, Callable[[float], Shadow], CollectorRegistry]


@pytest.fixture
def parts() -> Iterator[Parts]:
    active_models, registry = ActiveModels(), CollectorRegistry()
    active_models.swap("default", make_student())
    active_models.swap("challenger", make_student(version="v2"))
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


async def test_a_share_of_requests_is_compared_head_by_head(parts: Parts) -> None:
    _, batcher, new_shadow, registry = parts

    shadow = new_shadow(0.5)
    for _ in range(4):
        answers = await batcher.predict(["a b c", "ffff"], truncate=False)
        shadow.mirror(["a b c", "ffff"], answers, truncate=False, alias="default")
        await shadow.drain()
    assert counted(registry, "tone", "true") == 4  # two of four requests, two texts each
    assert counted(registry, "topics", "true") == 4
    assert counted(registry, "tone", "false") == 0


async def test_disagreement_is_counted(parts: Parts) -> None:
    _, batcher, new_shadow, registry = parts

    shadow = new_shadow(1.0)
    other = await batcher.predict(["ffff"], truncate=False)  # decides differently from "a b c"
    shadow.mirror(["a b c"], other, truncate=False, alias="default")
    await shadow.drain()
    assert counted(registry, "tone", "false") == 1


@pytest.mark.parametrize("case", ["no share", "its own alias", "no shadow model"])
async def test_the_shadow_does_not_answer_where_it_should_not(parts: Parts, case: str) -> None:
    active_models, batcher, new_shadow, registry = parts

    shadow = new_shadow(0.0 if case == "no share" else 1.0)
    if case == "no shadow model":
        active_models.swap("challenger", None)
    answers = await batcher.predict(["a"], truncate=False)
    alias = "challenger" if case == "its own alias" else "default"
    shadow.mirror(["a"], answers, truncate=False, alias=alias)
    await shadow.drain()
    assert counted(registry, "tone", "true") == 0


async def test_a_failing_shadow_has_no_effect_on_clients(parts: Parts) -> None:
    active_models, batcher, new_shadow, registry = parts

    def fail() -> None:
        raise RuntimeError("broken challenger")

    active_models.swap("challenger", make_student(CountingEngine(fail)))
    shadow = new_shadow(1.0)
    answers = await batcher.predict(["a"], truncate=False)
    shadow.mirror(["a"], answers, truncate=False, alias="default")
    await shadow.drain()
    assert counted(registry, "tone", "true") == 0
