"""Our API against other servers of the same weights: bursts of requests, in rounds that take turns.

The peers are installed into an environment of their own, which borrows torch and transformers from
ours, so that every server multiplies with the same library.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load import ask, free_port, serving
from synthetic import make_texts

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
PACKAGES = ("litserve", "bentoml")


def bench_peers(artifact: Path, *, requests: int, rounds: int, work_dir: Path) -> dict[str, Any]:
    """Return requests per second and processor seconds per request of each server."""
    python = _environment(work_dir / "peers")
    artifact = artifact.resolve()
    texts = make_texts(requests, seed=3)
    servers = {
        "ours": [sys.executable, str(HERE / "serve_student.py"), str(artifact), "PORT"],
        "naive": [sys.executable, str(HERE / "peer_naive.py"), str(artifact), "PORT"],
        "litserve": [str(python), str(HERE / "peer_litserve.py"), str(artifact), "PORT"],
        "bentoml": [
            str(python.parent / "bentoml"),
            "serve",
            "peer_bentoml:Front",
            "--port",
            "PORT",
            "--working-dir",
            str(HERE),
        ],
    }
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "BENCH_ARTIFACT": str(artifact),
        "BENTOML_DO_NOT_TRACK": "true",
        "STILLHOUSE_SERVING_LANES": "1",
        "STILLHOUSE_SERVING_THREADS": "1",
        "STILLHOUSE_SERVING_ENGINE": "packed",
        "STILLHOUSE_SERVING_DEADLINE_SECONDS": "600",
    }
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
    for turn in range(rounds):
        order = list(servers) if turn % 2 == 0 else list(reversed(servers))
        for name in order:
            port = free_port()
            command = [part.replace("PORT", str(port)) for part in servers[name]]
            log = work_dir / f"peer_{name}.log"
            with serving(command, port=port, env=env, log=log) as pid:
                load = ask(port, pid, texts, clients=32)
            measured[name].append(load.as_dict())
            print(f"{name}: {load.as_dict()}", flush=True)
    return {"versions": _versions(python), "requests": requests, "rounds": measured}


def _environment(directory: Path) -> Path:
    python = directory / "bin" / "python"
    marker = directory / "installed"
    if not marker.exists():
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
        marker.touch()
    return python


def _versions(python: Path) -> dict[str, str]:
    script = "import importlib.metadata as m, sys; [print(n, m.version(n)) for n in sys.argv[1:]]"
    names: Sequence[str] = (*PACKAGES, "torch", "transformers")
    done = subprocess.run(
        [str(python), "-c", script, *names], check=True, capture_output=True, text=True
    )
    return dict(line.split() for line in done.stdout.splitlines())
