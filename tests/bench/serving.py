"""`make bench-serving`: what serving costs here, as ratios within interleaved runs.

    python tests/bench/serving.py [prepare] [engines] [api] [swap] [peers] [--layers 28] [--json FILE]

Without a name all are run. `prepare` writes two synthetic students (1.2 GB each), their 8-bit and ONNX
forms (1.8 GB) and the peers' environment below --work-dir, once, so that what is measured afterwards
takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import json
import platform
import signal
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch
from api_share import bench_api
from engines import PLAIN, bench_engines, export_onnx, quantize_student
from peers import bench_peers, peers_environment
from swap import bench_swap
from synthetic import TYPE, write_student

PARTS = ("prepare", "engines", "api", "swap", "peers")


def main() -> None:
    """Run the named parts and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=32, help="a burst against each peer")
    parser.add_argument("--work-dir", type=Path, default=Path(".stillhouse/bench"))
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    parts = options.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no server is left behind
    work_dir = options.work_dir.resolve()
    artifact, second = (work_dir / f"student_{options.layers}{each}" for each in ("", "_b"))
    onnx_dir = work_dir / f"onnx_{options.layers}"
    python = _prepare(artifact, second, onnx_dir=onnx_dir, layers=options.layers)

    result: dict[str, Any] = {"machine": _machine(), "layers": options.layers}
    if "engines" in parts:
        result["engines"] = bench_engines(
            artifact,
            texts=options.texts,
            rounds=options.rounds,
            peers_python=python,
            onnx_dir=onnx_dir,
        )
        _print_engines(result["engines"])
    if "api" in parts:
        result["api"] = bench_api(artifact, requests=3000, clients=16, log_dir=work_dir)
        print(f"\nAPI alone: {result['api']['cpu_ms_per_request']:.3f} ms CPU per request")
    if "swap" in parts:
        result["swap"] = bench_swap(artifact, second, swaps=4)
        print(f"\nSwaps under load: {json.dumps(result['swap'], indent=2)}")
    if "peers" in parts:
        result["peers"] = bench_peers(
            artifact,
            python=python,
            requests=options.requests,
            rounds=options.rounds,
            work_dir=work_dir,
        )
        _print_peers(result["peers"])
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))


def _prepare(artifact: Path, second: Path, *, onnx_dir: Path, layers: int) -> Path:
    """Write what is not there yet, and return the peers' Python."""
    artifact.parent.mkdir(parents=True, exist_ok=True)
    write_student(artifact, layers=layers, seed=0)
    write_student(second, layers=layers, seed=1)
    quantize_student(artifact)
    python = peers_environment(artifact.parent / "peers")
    export_onnx(artifact, onnx_dir, peers_python=python)
    return python


def _machine() -> dict[str, Any]:
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


def _print_engines(result: dict[str, Any]) -> None:
    rates, agreement = result["tokens_per_cpu_second"], result["agreement_with_transformers"]
    plain = rates[PLAIN]
    print(f"{result['texts']} texts, {result['tokens']} tokens, one thread")
    print(f"{'':34}{'tok/CPU-s':>10}{'ratio':>8}{'of limit':>10}{'agrees':>8}")
    for name, rate in rates.items():
        kind = "int8" if "int8" in name else TYPE
        limit = rates[f"{kind} products alone"]
        agrees = f"{agreement[name]:.1%}" if name in agreement else ""
        print(f"{name:34}{rate:10.1f}{rate / plain:8.2f}{rate / limit:10.1%}{agrees:>8}")


def _print_peers(result: dict[str, Any]) -> None:
    print(
        f"\nOver HTTP, {result['requests']} requests of as many clients at once; {result['versions']}"
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
