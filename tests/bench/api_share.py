"""What the API costs by itself: an engine that answers at once, real tokenising, queue and lanes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from load import ask, free_port, serving
from synthetic import make_texts

HERE = Path(__file__).parent


def bench_api(artifact: Path, *, requests: int, clients: int, log_dir: Path) -> dict[str, Any]:
    """Return the processor time of the API for one request, with the texts of the other benchmarks."""
    port = free_port()
    command = [sys.executable, str(HERE / "serve_student.py"), str(artifact), str(port), "--null"]
    texts = make_texts(requests)
    with serving(command, port=port, env=dict(os.environ), log=log_dir / "api.log") as pid:
        ask(port, pid, texts[:500], clients=clients)
        rounds = [ask(port, pid, texts, clients=clients).as_dict() for _ in range(3)]
    best = min(each["cpu_seconds_per_request"] for each in rounds)
    return {"cpu_ms_per_request": 1000 * best, "rounds": rounds}
