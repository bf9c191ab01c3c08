"""The cost of the API alone: a null engine with real tokenisation, queue and lanes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TypedDict

from tests.bench.load import free_port, send, serving
from tests.bench.synthetic import make_texts

ROOT = Path(__file__).parents[2]


class ApiResult(TypedDict):
    """The best round, and all of them."""

    cpu_ms_per_request: float
    rounds: list[dict[str, float]]


def bench_api(artifact: Path, *, requests: int, clients: int, log_dir: Path) -> ApiResult:
    """Return the CPU time of the API per request, with the texts of the other benchmarks."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "tests.bench.serve_student",
        str(artifact),
        str(port),
        "--null",
    ]
    texts = make_texts(requests)
    with serving(
        command, port=port, env=os.environ | {"PYTHONPATH": str(ROOT)}, log=log_dir / "api.log"
    ) as pid:
        send(port, pid, texts[:500], clients=clients)
        rounds = [send(port, pid, texts, clients=clients).as_dict() for _ in range(3)]
    best = min(each["cpu_seconds_per_request"] for each in rounds)
    return {"cpu_ms_per_request": 1000 * best, "rounds": rounds}
