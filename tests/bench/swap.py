"""A swap under load: requests that fail, latency while the new student loads, memory afterwards."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import psutil
from synthetic import make_texts

from services.api.serving.errors import PredictionError
from services.api.serving.predictor import Predictor
from services.api.serving.promoted import Promoted
from services.api.serving.settings import ServingSettings

CLIENTS = 2
QUIET_SECONDS = 30.0
AFTER_SECONDS = 5.0


def bench_swap(first: Path, second: Path) -> dict[str, Any]:
    """Return what the clients and the memory saw of a swap from one artifact to another."""
    return asyncio.run(_swap(first, second))


async def _swap(first: Path, second: Path) -> dict[str, Any]:
    promoted = [Promoted("prm_1", "default", "mdl_1", "bench", "v1", first)]
    settings = ServingSettings(lanes=1, threads=1, batch_tokens=256)
    predictor = Predictor(settings, promotions=lambda: list(promoted))
    predictor.start()
    await _until(lambda: predictor.active() is not None)
    seen: list[tuple[float, float, str]] = []  # when it began, how long it took, who answered
    errors: list[PredictionError] = []
    stop = asyncio.Event()
    clients = [
        asyncio.ensure_future(_client(predictor, number, seen, errors, stop))
        for number in range(CLIENTS)
    ]
    await asyncio.sleep(QUIET_SECONDS)
    former = predictor.active()
    before = _resident()
    promoted_at = time.perf_counter()
    promoted.insert(0, Promoted("prm_2", "default", "mdl_2", "bench", "v2", second))
    peak = before
    while predictor.active() is former:
        peak = max(peak, _resident())
        await asyncio.sleep(0.05)
    swapped_at = time.perf_counter()
    assert former is not None
    await asyncio.to_thread(former.closed.wait, 60)
    await asyncio.sleep(AFTER_SECONDS)
    stop.set()
    await asyncio.gather(*clients)
    after = _resident()
    await predictor.stop()
    quiet = [took for began, took, _ in seen if began < promoted_at - 2]
    during = [took for began, took, _ in seen if promoted_at <= began < swapped_at]
    return {
        "requests": len(seen),
        "failed": len(errors),
        "seconds_to_swap": swapped_at - promoted_at,
        "quiet_ms": _percentiles(quiet),
        "during_ms": _percentiles(during),
        "versions": sorted({version for _, _, version in seen}),
        "resident_mib": {"before": before >> 20, "peak": peak >> 20, "after": after >> 20},
    }


async def _client(
    predictor: Predictor,
    number: int,
    seen: list[tuple[float, float, str]],
    errors: list[PredictionError],
    stop: asyncio.Event,
) -> None:
    texts = make_texts(200, seed=10 + number)
    turn = 0
    while not stop.is_set():
        began = time.perf_counter()
        try:
            [answer] = await predictor.predict([texts[turn % len(texts)]], truncate=True)
        except PredictionError as error:
            errors.append(error)
            continue
        seen.append((began, time.perf_counter() - began, answer.version))
        turn += 1


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.05)


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "p50": 1000 * ordered[len(ordered) // 2],
        "p99": 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }
