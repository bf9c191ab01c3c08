"""`make bench-serving`: the cost of serving on this machine, as ratios within interleaved runs.

    python -m tests.bench.serving [prepare] [engines] [api] [swap] [peers] [--layers 28] [--json FILE]

Without a name all parts run. `prepare` writes two synthetic students (1.2 GB each), their 8-bit and ONNX
forms (1.8 GB) and the peers' environment below --work-dir, once; after that, measuring takes a quarter of
an hour.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
from pathlib import Path
from statistics import median

import torch

from tests.bench.api_share import bench_api
from tests.bench.engines import PLAIN, EnginesResult, bench_engines, export_onnx, quantize_student
from tests.bench.peers import PeersResult, bench_peers, peers_environment
from tests.bench.swap import bench_swap
from tests.bench.synthetic import TYPE, write_student

PARTS = ("prepare", "engines", "api", "swap", "peers")


def main() -> None:
    """Run the named parts and print their results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--requests", type=int, default=32, help="size of the burst sent to each peer"
    )
    parser.add_argument("--work-dir", type=Path, default=Path(".stillhouse/bench"))
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    parts = options.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    work_dir = options.work_dir.resolve()
    artifact, second = (work_dir / f"student_{options.layers}{each}" for each in ("", "_b"))
    onnx_dir = work_dir / f"onnx_{options.layers}"
    python = _prepare(artifact, second, onnx_dir=onnx_dir, layers=options.layers)

    result: dict[str, object] = {"machine": _machine(), "layers": options.layers}
    if "engines" in parts:
        engines = bench_engines(
            artifact,
            texts=options.texts,
            rounds=options.rounds,
            peers_python=python,
            onnx_dir=onnx_dir,
        )
        _print_engines(engines)
        result["engines"] = engines
    if "api" in parts:
        api = bench_api(artifact, requests=3000, clients=16, log_dir=work_dir)
        print(f"\nAPI alone: {api['cpu_ms_per_request']:.3f} ms CPU per request")
        result["api"] = api
    if "swap" in parts:
        result["swap"] = bench_swap(artifact, second, swaps=4)
        print(f"\nSwaps under load: {json.dumps(result['swap'], indent=2)}")
    if "peers" in parts:
        peers = bench_peers(
            artifact,
            python=python,
            requests=options.requests,
            rounds=options.rounds,
            work_dir=work_dir,
        )
        _print_peers(peers)
        result["peers"] = peers
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))


def _prepare(artifact: Path, second: Path, *, onnx_dir: Path, layers: int) -> Path:
    """Write what does not exist yet, and return the Python of the peers' environment."""
    artifact.parent.mkdir(parents=True, exist_ok=True)
    write_student(artifact, layers=layers, seed=0)
    write_student(second, layers=layers, seed=1)
    quantize_student(artifact)
    python = peers_environment(artifact.parent / "peers")
    export_onnx(artifact, onnx_dir, peers_python=python)
    return python


def _machine() -> dict[str, object]:
    cpuinfo = Path("/proc/cpuinfo")
    names = [
        line.partition(":")[2].strip()
        for line in (cpuinfo.read_text().splitlines() if cpuinfo.exists() else [])
        if line.startswith("model name")
    ]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": len(names),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _print_engines(result: EnginesResult) -> None:
    rates, agreement = result["tokens_per_cpu_second"], result["agreement_with_transformers"]
    plain = rates[PLAIN]
    print(f"{result['texts']} texts, {result['tokens']} tokens, one thread")
    print(f"{'':34}{'tok/CPU-s':>10}{'ratio':>8}{'of limit':>10}{'agrees':>8}")
    for name, rate in rates.items():
        kind = "int8" if "int8" in name else TYPE
        limit = rates[f"{kind} products alone"]
        agrees = f"{agreement[name]:.1%}" if name in agreement else ""
        print(f"{name:34}{rate:10.1f}{rate / plain:8.2f}{rate / limit:10.1%}{agrees:>8}")


def _print_peers(result: PeersResult) -> None:
    print(
        f"\nOver HTTP, {result['requests']} concurrent requests, one per client; {result['versions']}"
    )
    print(f"{'median of rounds':16}{'CPU s/request':>14}{'requests/s':>12}", end="")
    print("".join(f"{f'CPU over {ours}':>22}{'throughput':>12}" for ours in result["ratios"]))
    for name, rounds in result["rounds"].items():
        cpu, rate = (
            median(each[key] for each in rounds)
            for key in ("cpu_seconds_per_request", "requests_per_second")
        )
        print(f"{name:16}{cpu:14.3f}{rate:12.2f}", end="")
        for ratios in result["ratios"].values():
            print(f"{ratios[name]['cpu']:22.2f}{ratios[name]['throughput']:12.2f}", end="")
        print(f"   errors {sum(each['errors'] for each in rounds):.0f}")


if __name__ == "__main__":
    main()
