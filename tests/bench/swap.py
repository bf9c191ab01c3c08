"""Swaps under load: failed requests, latency while the new student loads, memory afterwards.

Two artifacts alternate. Each swap follows an interval without one, so that the compared latencies are of
the same minutes; they are pooled over the swaps. The lane leaves one core to the loading thread: if every
core computed, loading would take its share from the requests like any other work.

    python swap.py FIRST SECOND SWAPS     prints the result as a line of JSON, among log lines
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil

from services.api.serving.errors import PredictionError
from services.api.serving.predictor import Predictor
from services.api.serving.promotion import Promotion
from services.api.serving.settings import EngineChoice, ServingSettings
from tests.bench.synthetic import make_texts

CLIENTS = 2
SETTLE_SECONDS = 5.0
QUIET_SECONDS = 12.0


@dataclass
class _Observations:
    """The start, duration and version of each answered request, and the errors."""

    answers: list[tuple[float, float, str]] = field(default_factory=list)
    errors: list[PredictionError] = field(default_factory=list)

    def durations(self, intervals: list[tuple[float, float]]) -> list[float]:
        return [
            duration
            for began, duration, _ in self.answers
            if any(first <= began < last for first, last in intervals)
        ]


class _Memory(NamedTuple):
    """The bytes of a process: resident memory, and the anonymous part of it."""

    resident: int
    anonymous: int


def bench_swap(first: Path, second: Path, *, swaps: int) -> dict[str, object]:
    """Return the effect of swaps between two artifacts on clients and memory.

    Runs in a new process, whose memory nothing else has used before.
    """
    done = subprocess.run(
        [sys.executable, __file__, str(first), str(second), str(swaps)],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    [line] = [each for each in done.stdout.splitlines() if each.startswith("{")]
    result: dict[str, object] = json.loads(line)
    return result


async def _swap(artifacts: list[Path], swaps: int) -> dict[str, object]:
    promotions = [Promotion("prm_0", "default", "mdl_0", "bench", "v0", artifacts[0])]
    threads = max(1, len(os.sched_getaffinity(0)) - 1)
    settings = ServingSettings(
        lanes=1, threads=threads, batch_tokens=256, engine=EngineChoice.PACKED
    )
    predictor = Predictor(settings, promotions=lambda: list(promotions))
    predictor.start()
    await _until(lambda: predictor.active() is not None)
    observations, stop = _Observations(), asyncio.Event()
    clients = [
        asyncio.ensure_future(_client(predictor, number, observations, stop))
        for number in range(CLIENTS)
    ]
    quiet, during, peak = [], [], 0
    memory: list[_Memory] = []
    for turn in range(1, swaps + 1):
        await asyncio.sleep(SETTLE_SECONDS)
        memory.append(_memory())
        begun = time.perf_counter()
        await asyncio.sleep(QUIET_SECONDS)
        previous, promoted_at = predictor.active(), time.perf_counter()
        name = f"v{turn}"
        directory = artifacts[turn % len(artifacts)]
        promotions.insert(
            0, Promotion(f"prm_{turn}", "default", f"mdl_{turn}", "bench", name, directory)
        )
        while predictor.active() is previous:
            peak = max(peak, _memory().anonymous)
            await asyncio.sleep(0.05)
        quiet.append((begun, promoted_at))
        during.append((promoted_at, time.perf_counter()))
        assert previous is not None
        assert await asyncio.to_thread(previous.closed.wait, 60), (
            "the previous student was not closed"
        )
    await asyncio.sleep(SETTLE_SECONDS)
    memory.append(_memory())
    stop.set()
    await asyncio.gather(*clients)
    await predictor.stop()
    without, during_swap = (
        _percentiles(observations.durations(quiet)),
        _percentiles(observations.durations(during)),
    )
    return {
        "swaps": swaps,
        "requests": len(observations.answers),
        "failed": len(observations.errors),
        "versions": len({version for _, _, version in observations.answers}),
        "seconds_to_swap": [last - first for first, last in during],
        "quiet_ms": without,
        "during_ms": during_swap,
        "p99_over_quiet": during_swap["p99"] / without["p99"],
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
    observations: _Observations,
    stop: asyncio.Event,
) -> None:
    texts = make_texts(200, seed=10 + number)
    turn = 0
    while not stop.is_set():
        began = time.perf_counter()
        try:
            [answer] = await predictor.predict([texts[turn % len(texts)]], truncate=True)
        except PredictionError as error:
            observations.errors.append(error)
            continue
        observations.answers.append((began, time.perf_counter() - began, answer.version))
        turn += 1


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.05)


def _memory() -> _Memory:
    """Return the memory of this process. The kernel may evict and reload pages of mapped files."""
    used = psutil.Process().memory_info()
    return _Memory(int(used.rss), int(used.rss - used.shared))


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
