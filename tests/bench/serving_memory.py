"""Resident memory of the API over many predictions: it must not grow by more than 5 %.

    python -m tests.bench.serving_memory --requests 1000000

A tiny student behind the production server, 64 connections, every text different; one request
in fifty is refused. Memory is compared with that after the warm-up.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import psutil

from tests.api.serving.artifacts import write_artifact
from tests.bench.load import free_port, serving
from tests.bench.rounds import Sent, send_rounds
from tests.bench.synthetic import make_texts

WARM_UP = 5000
MAX_GROWTH = 0.05
MIB = 2**20
_CHUNK = 5000
_ONE_REFUSED_IN = 50


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
        refused = _send(port, WARM_UP, seed=0).refused
        base = process.memory_info().rss
        print(f"after {WARM_UP:,} requests: {base / MIB:.1f} MiB", flush=True)
        sent, growth, worst = 0, 0.0, 0.0
        while sent < requests and time.monotonic() - started < seconds:
            load = _send(port, min(_CHUNK, requests - sent), seed=sent + 1)
            sent, refused = sent + load.requests, refused + load.refused
            growth = process.memory_info().rss / base - 1
            worst = max(worst, growth)
            print(
                f"{sent:,} requests ({load.requests / load.seconds:.0f}/s): "
                f"{process.memory_info().rss / MIB:.1f} MiB, {growth:+.1%}",
                flush=True,
            )
    print(
        f"{sent:,} requests, {refused / (WARM_UP + sent):.1%} refused: {base / MIB:.1f} MiB after the warm-up, "
        f"{growth:+.2%} at the end, {worst:+.2%} at most"
    )
    # A server that refuses everything serves nothing, and says nothing about its memory.
    as_intended = refused == (WARM_UP + sent) // _ONE_REFUSED_IN
    if not as_intended:
        print(f"{refused:,} requests were refused, not one in {_ONE_REFUSED_IN}")
    return int(growth > MAX_GROWTH or not as_intended)


def _send(port: int, count: int, *, seed: int) -> Sent:
    endings = _endings()
    texts = [f"{seed} {number} {endings[number % len(endings)]}" for number in range(count)]
    texts[::_ONE_REFUSED_IN] = ["\x01"] * len(texts[::_ONE_REFUSED_IN])  # a control character
    return send_rounds(port, texts)


@lru_cache(maxsize=1)
def _endings() -> list[str]:
    return [text[:50] for text in make_texts(2000)]


if __name__ == "__main__":
    main()
