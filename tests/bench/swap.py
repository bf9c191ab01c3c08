"""Swaps under load: requests that fail, latency while the new student loads, memory afterwards.

Two artifacts take turns. Each swap follows a quiet stretch, so that the latencies compared are of the
same minutes; they are pooled over the swaps. The lane leaves one core to the loading thread: on a
machine whose every core computes, loading takes its share from the requests like any other work.

    python swap.py FIRST SECOND SWAPS     prints the result as a line of JSON, among log lines
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from synthetic import make_texts

from services.api.serving.errors import PredictionError
from services.api.serving.predictor import Predictor
from services.api.serving.promotion import Promotion
from services.api.serving.settings import EngineChoice, ServingSettings

CLIENTS = 2
SETTLE_SECONDS = 5.0
QUIET_SECONDS = 12.0


@dataclass
class _Seen:
    """What the clients saw: when each request began, how long it took, who answered."""

    answers: list[tuple[float, float, str]] = field(default_factory=list)
    errors: list[PredictionError] = field(default_factory=list)

    def took(self, stretches: list[tuple[float, float]]) -> list[float]:
        return [
            took
            for began, took, _ in self.answers
            if any(first <= began < last for first, last in stretches)
        ]


class _Memory(NamedTuple):
    """Bytes of a process: all that is resident, and of that what no file could bring back."""

    resident: int
    anonymous: int


def bench_swap(first: Path, second: Path, *, swaps: int) -> dict[str, Any]:
    """Return what the clients and the memory saw of swaps between two artifacts.

    In a process of its own, whose memory nothing else has used before.
    """
    done = subprocess.run(
        [sys.executable, __file__, str(first), str(second), str(swaps)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    [line] = [each for each in done.stdout.splitlines() if each.startswith("{")]
    result: dict[str, Any] = json.loads(line)
    return result


async def _swap(artifacts: list[Path], swaps: int) -> dict[str, Any]:
    promoted = [Promotion("prm_0", "default", "mdl_0", "bench", "v0", artifacts[0])]
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    settings = ServingSettings(
        lanes=1, threads=threads, batch_tokens=256, engine=EngineChoice.PACKED
    )
    predictor = Predictor(settings, promotions=lambda: list(promoted))
    predictor.start()
    await _until(lambda: predictor.active() is not None)
    seen, stop = _Seen(), asyncio.Event()
    clients = [
        asyncio.ensure_future(_client(predictor, number, seen, stop)) for number in range(CLIENTS)
    ]
    quiet, during, peak = [], [], 0
    memory: list[_Memory] = []
    for turn in range(1, swaps + 1):
        await asyncio.sleep(SETTLE_SECONDS)
        memory.append(_memory())
        begun = time.perf_counter()
        await asyncio.sleep(QUIET_SECONDS)
        former, asked = predictor.active(), time.perf_counter()
        name = f"v{turn}"
        directory = artifacts[turn % len(artifacts)]
        promoted.insert(
            0, Promotion(f"prm_{turn}", "default", f"mdl_{turn}", "bench", name, directory)
        )
        while predictor.active() is former:
            peak = max(peak, _memory().anonymous)
            await asyncio.sleep(0.05)
        quiet.append((begun, asked))
        during.append((asked, time.perf_counter()))
        assert former is not None
        assert await asyncio.to_thread(former.closed.wait, 60), "the former student is not let go"
    await asyncio.sleep(SETTLE_SECONDS)
    memory.append(_memory())
    stop.set()
    await asyncio.gather(*clients)
    await predictor.stop()
    calm, busy = _percentiles(seen.took(quiet)), _percentiles(seen.took(during))
    return {
        "swaps": swaps,
        "requests": len(seen.answers),
        "failed": len(seen.errors),
        "versions": len({version for _, _, version in seen.answers}),
        "seconds_to_swap": [last - first for first, last in during],
        "quiet_ms": calm,
        "during_ms": busy,
        "p99_over_quiet": busy["p99"] / calm["p99"],
        "resident_mib": [each.resident >> 20 for each in memory],
        "anonymous_mib": [each.anonymous >> 20 for each in memory],
        "anonymous_peak_mib": peak >> 20,
        "resident_after_over_before": memory[-1].resident / memory[0].resident,
        "anonymous_after_over_before": memory[-1].anonymous / memory[0].anonymous,
        # The first swap also grows the allocator's arenas to what two students at once need.
        "anonymous_after_over_after_first": memory[-1].anonymous / memory[1].anonymous,
    }


async def _client(
    predictor: Predictor,
    number: int,
    seen: _Seen,
    stop: asyncio.Event,
) -> None:
    texts = make_texts(200, seed=10 + number)
    turn = 0
    while not stop.is_set():
        began = time.perf_counter()
        try:
            [answer] = await predictor.predict([texts[turn % len(texts)]], truncate=True)
        except PredictionError as error:
            seen.errors.append(error)
            continue
        seen.answers.append((began, time.perf_counter() - began, answer.version))
        turn += 1


async def _until(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0.05)


def _memory() -> _Memory:
    """Return what the process holds. Pages of mapped files come and go with the kernel's cache."""
    held = psutil.Process().memory_info()
    return _Memory(int(held.rss), int(held.rss - held.shared))


def _percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "p50": 1000 * ordered[len(ordered) // 2],
        "p99": 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))],
    }


if __name__ == "__main__":
    paths = [Path(each) for each in sys.argv[1:3]]
    print(json.dumps(asyncio.run(_swap(paths, int(sys.argv[3])))))
