"""`make bench-serving`: what serving costs here, as ratios within interleaved runs.

    python tests/bench/serving.py [engines] [api] [swap] [peers] [--layers 28] [--json FILE]

Without a name all are run. The synthetic student (1.2 GB) is written once, below --work-dir.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch
from api_share import bench_api
from engines import bench_engines
from peers import bench_peers
from swap import bench_swap
from synthetic import write_student

PARTS = ("engines", "api", "swap", "peers")


def main() -> None:
    """Run the named parts and print what they measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--texts", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32, help="a burst against each peer")
    parser.add_argument("--work-dir", type=Path, default=Path(".stillhouse/bench"))
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    parts = options.parts or list(PARTS)
    if unknown := set(parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    options.work_dir.mkdir(parents=True, exist_ok=True)
    artifact = options.work_dir / f"student_{options.layers}"
    write_student(artifact, layers=options.layers, seed=0)

    result: dict[str, Any] = {"machine": _machine(), "layers": options.layers}
    if "engines" in parts:
        result["engines"] = bench_engines(artifact, texts=options.texts, rounds=options.rounds)
        _print_engines(result["engines"])
    if "api" in parts:
        result["api"] = bench_api(artifact, requests=3000, clients=16, log_dir=options.work_dir)
        print(f"\nAPI alone: {result['api']['cpu_ms_per_request']:.3f} ms CPU per request")
    if "swap" in parts:
        second = options.work_dir / f"student_{options.layers}_b"
        write_student(second, layers=options.layers, seed=1)
        result["swap"] = bench_swap(artifact, second)
        print(f"\nSwap under load: {json.dumps(result['swap'], indent=2)}")
    if "peers" in parts:
        result["peers"] = bench_peers(
            artifact, requests=options.requests, rounds=options.rounds, work_dir=options.work_dir
        )
        print(f"\nOver HTTP: {json.dumps(result['peers'], indent=2)}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))


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
    rates, agreement = result["tokens_per_cpu_second"], result["agreement_with_transformers_bf16"]
    plain = rates["transformers bf16, one by one"]
    print(f"{result['texts']} texts, {result['tokens']} tokens, one thread")
    print(f"{'':34}{'tok/CPU-s':>10}{'ratio':>8}{'of limit':>10}{'agrees':>8}")
    for name, rate in rates.items():
        kind = "int8" if "int8" in name else "bf16"
        limit = rates[f"{kind} products alone"]
        agrees = f"{agreement[name]:.1%}" if name in agreement else ""
        print(f"{name:34}{rate:10.1f}{rate / plain:8.2f}{rate / limit:10.1%}{agrees:>8}")


if __name__ == "__main__":
    main()
