"""Our API against other servers of the same weights: bursts of requests, in interleaved rounds.

The peers are installed into an environment of their own, which borrows torch and transformers from
ours, so that every server multiplies with the same library. All servers are up before the first round
and idle while another is asked; each may use every core. Ratios are medians over rounds of the ratio
within a round, where all are asked the same texts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import TypedDict

from tests.bench.load import Load, cpu_seconds, free_port, send, serving
from tests.bench.synthetic import DTYPE, TYPE, make_texts

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PACKAGES = (
    "litserve==0.2.19",
    "bentoml==1.4.40",
    "onnxruntime==1.32.0",
    "onnx==1.23.2",
    "onnxscript==0.7.2",
)
CLIENTS = 32
OURS = ("ours, int8", f"ours, {TYPE}")


class PeersResult(TypedDict):
    """The figures of each server by its name, and their ratios to each of ours."""

    versions: dict[str, str]
    requests: int
    rounds: dict[str, list[dict[str, float]]]
    idle_cores: dict[str, float]
    ratios: dict[str, dict[str, dict[str, float]]]


def bench_peers(
    artifact: Path, *, python: Path, requests: int, rounds: int, work_dir: Path
) -> PeersResult:
    """Return requests per second and CPU seconds per request of each server."""
    artifact = artifact.resolve()
    student = [sys.executable, "-m", "tests.bench.serve_student", str(artifact), "PORT"]
    bentoml = [str(python.parent / "bentoml"), "serve", "peer_bentoml:Front", "--port", "PORT"]
    servers = {
        OURS[0]: [*student, "--int8"],
        OURS[1]: student,
        "naive": [sys.executable, str(HERE / "peer_naive.py"), str(artifact), "PORT"],
        "litserve": [str(python), str(HERE / "peer_litserve.py"), str(artifact), "PORT"],
        "bentoml": [*bentoml, "--working-dir", str(HERE)],
    }
    measured: dict[str, list[Load]] = {name: [] for name in servers}
    with ExitStack() as stack:
        running: dict[str, tuple[int, int]] = {}
        for name, command in servers.items():
            port = free_port()
            started = serving(
                [part.replace("PORT", str(port)) for part in command],
                port=port,
                env=_environ(artifact),
                log=work_dir / f"peer_{name.replace(', ', '_')}.log",
            )
            running[name] = (port, stack.enter_context(started))
            send(*running[name], make_texts(4, seed=2), clients=4)  # warm-up
        idle = {name: _idle_share(pid) for name, (_, pid) in running.items()}
        for turn in range(rounds):
            texts = make_texts(requests, seed=3 + turn)
            for name in list(servers) if turn % 2 == 0 else reversed(servers):
                load = send(*running[name], texts, clients=CLIENTS)
                measured[name].append(load)
                print(f"round {turn + 1}, {name}: {load.as_dict()}", flush=True)
    return {
        "versions": _versions(python),
        "requests": requests,
        "rounds": {name: [load.as_dict() for load in loads] for name, loads in measured.items()},
        "idle_cores": idle,
        "ratios": {ours: _ratios(measured, ours) for ours in OURS},
    }


def _ratios(measured: dict[str, list[Load]], ours: str) -> dict[str, dict[str, float]]:
    """Return the ratios of CPU time and throughput of each server to ours."""
    ratios = {}
    for name, theirs in measured.items():
        pairs = list(zip(measured[ours], theirs, strict=True))
        ratios[name] = {
            "cpu": median(their.cpu_seconds / our.cpu_seconds for our, their in pairs),
            "throughput": median(their.seconds / our.seconds for our, their in pairs),
        }
    return ratios


def _idle_share(pid: int, seconds: float = 2.0) -> float:
    """Return how many cores a server uses while idle, which slows down the rounds of the others."""
    before = cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / seconds


def _environ(artifact: Path) -> dict[str, str]:
    cores = str(len(os.sched_getaffinity(0)))
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": cores,
        "BENCH_THREADS": cores,
        "BENCH_ARTIFACT": str(artifact),
        "BENCH_DTYPE": str(DTYPE).removeprefix("torch."),
        "BENTOML_DO_NOT_TRACK": "true",
        "STILLHOUSE_SERVING_ENGINE": "packed",
        "STILLHOUSE_SERVING_DEADLINE_SECONDS": "600",
    }


def peers_environment(directory: Path) -> Path:
    """Install the peers, unless they are there already, and return their Python."""
    python = directory / "bin" / "python"
    marker = directory / "installed"
    wanted = "\n".join(PACKAGES)
    if not marker.exists() or marker.read_text() != wanted:
        subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *PACKAGES]
        subprocess.run(install, check=True)
        own = subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        (Path(own) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
        marker.write_text(wanted)
    return python


def _versions(python: Path) -> dict[str, str]:
    script = "import importlib.metadata as m, sys; [print(n, m.version(n)) for n in sys.argv[1:]]"
    names: Sequence[str] = [name.partition("==")[0] for name in PACKAGES]
    done = subprocess.run(
        [str(python), "-c", script, *names, "torch", "transformers"],
        check=True,
        capture_output=True,
        text=True,
    )
    return dict(line.split() for line in done.stdout.splitlines())
