"""Resident memory of the API over many predictions: it must not grow by more than 5 %.

    python -m tests.bench.serving_memory --requests 1000000

A tiny student behind the production server, clients with connections that stay open, every text different;
one request in fifty is refused. Memory is compared with that after the warm-up.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.api.serving.artifacts import write_artifact
from tests.bench.load import Load, free_port, send, serving
from tests.bench.synthetic import make_texts

WARM_UP = 5000
MAX_GROWTH = 0.05
MIB = 2**20
_CHUNK = 5000
_CLIENTS = 8


def main() -> None:
    """Send the requests, print the memory as it goes, and exit with 1 if it has grown too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="Stop after this time.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        artifact = write_artifact(Path(directory) / "student", "qwen3")
        sys.exit(_run(artifact, requests=options.requests, seconds=options.seconds))


def _run(artifact: Path, *, requests: int, seconds: float) -> int:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "tests.bench.serve_student",
        str(artifact),
        str(port),
    ]
    log = artifact.with_name("server.log")
    env = dict(os.environ) | {"STILLHOUSE_SERVING_THREADS": "1"}
    started = time.monotonic()
    with serving(command, port=port, env=env, log=log) as pid:
        process = psutil.Process(pid)
        refused = _send(port, pid, WARM_UP, seed=0).errors
        base = process.memory_info().rss
        print(f"after {WARM_UP:,} requests: {base / MIB:.1f} MiB", flush=True)
        sent, growth, worst = 0, 0.0, 0.0
        while sent < requests and time.monotonic() - started < seconds:
            load = _send(port, pid, min(_CHUNK, requests - sent), seed=sent + 1)
            sent, refused = sent + load.requests, refused + load.errors
            growth = process.memory_info().rss / base - 1
            worst = max(worst, growth)
            print(
                f"{sent:,} requests ({load.requests / load.seconds:.0f}/s): "
                f"{process.memory_info().rss / MIB:.1f} MiB, {growth:+.1%}",
                flush=True,
            )
    print(f"{sent:,} requests, {refused:,} refused: {growth:+.2%} at the end, {worst:+.2%} at most")
    return int(growth > MAX_GROWTH)


def _send(port: int, pid: int, count: int, *, seed: int) -> Load:
    texts = [
        f"{seed} {number} {text}"[:60] for number, text in enumerate(make_texts(count, seed=seed))
    ]
    texts[::50] = ["\x01"] * len(texts[::50])  # refused: a control character
    return send(port, pid, texts, clients=_CLIENTS)


if __name__ == "__main__":
    main()
