"""The doctor's checks that need several ranks: collectives, and whether sharding takes effect."""

from __future__ import annotations

import json
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import TypedDict

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from services.shared.datasets.card import Head
from services.shared.jobs.documents import ObservedShardingDict
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.spec import Recipe
from services.shared.model.classifier import build_classifier, build_config
from services.shared.training.memory_probe import observe_sharding
from services.shared.training.process import StopWatch, World
from services.shared.training.sharding.load import initialise
from services.shared.training.sharding.shard import shard_classifier

Result = tuple[str, str, str]  # status, detail, remedy
Measurements = dict[str, int | bool | None]

_SECONDS = 120.0  # building rings for the first collective takes seconds; a hang never ends
_MOST_RANKS = 8
_STOPPED = "Jobs will be stopped before their first step (not_sharded); report the versions."
_ALL_REDUCE_BYTES = 2**28
_SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


class RankReport(TypedDict, total=False):
    """What one rank writes: `error` alone, or everything else; nothing where it was killed."""

    error: str
    backend: str
    measured: Measurements
    observed: ObservedShardingDict


def check_ranks(device: torch.device) -> tuple[dict[str, Result], Measurements]:
    """Start ranks for these checks; return their results by name, and the measurements."""
    size = 2 if device.type == "cpu" else min(torch.cuda.device_count(), _MOST_RANKS)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        context = processes.get_context("spawn")
        ranks = [
            context.Process(target=_rank, args=(rank, size, device.type, scratch), daemon=True)
            for rank in range(size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + _SECONDS
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
        hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        reports = [_read(directory / f"{rank}.json") for rank in range(size)]
        failures = {r: p.exitcode for r, p in enumerate(ranks) if r not in hung and p.exitcode}
        return _findings(reports, hung=hung, failures=failures, size=size)


def _findings(
    reports: list[RankReport], *, hung: list[int], failures: dict[int, int], size: int
) -> tuple[dict[str, Result], Measurements]:
    if hung:
        return {
            "collectives": (
                "failed",
                f"ranks {hung} of {size} hang after {_SECONDS:.0f} s",
                "Try NCCL_P2P_DISABLE=1, then IOMMU and ACS off in the BIOS; on a CPU, "
                "GLOO_SOCKET_IFNAME=lo.",
            )
        }, {}
    if failures:
        errors = [report["error"] for report in reports if "error" in report]
        what = errors[0] if errors else f"exit codes {failures}"
        return {
            "collectives": ("failed", what, "Check devices, shared memory and locked memory above.")
        }, {}
    first = reports[0]
    collectives = f"all-reduce, all-gather and reduce-scatter are correct on {size} ranks"
    found: dict[str, Result] = {"collectives": ("ok", f"{collectives} ({first['backend']})", "")}
    if size == 1:
        found["collectives"] = (
            "warning",
            f"only one device: no data crosses between ranks ({first['backend']} starts)",
            "A job on one rank does not shard; use two devices or more for large teachers.",
        )
    found["loading"] = ("ok", "every parameter of every rank was filled, by checksum", "")
    found["sharding"] = _sharding([report["observed"] for report in reports], size)
    return found, first["measured"]


def _sharding(observed: list[ObservedShardingDict], size: int) -> Result:
    """Compare the units, bytes and dtypes that each rank holds after wrapping with the expected ones."""
    for rank, seen in enumerate(observed):
        if seen["sharded_units"] != seen["expected_units"]:
            return (
                "failed",
                f"rank {rank} formed {seen['sharded_units']} units of {seen['expected_units']}",
                _STOPPED,
            )
        if seen["local_parameter_bytes"] > seen["expected_local_parameter_bytes"] * 1.1:
            return (
                "failed",
                f"rank {rank} holds {seen['local_parameter_bytes']} bytes of parameters, "
                f"not {seen['expected_local_parameter_bytes']}",
                _STOPPED,
            )
        if len(seen["parameter_dtypes"]) != 1:
            return (
                "failed",
                f"rank {rank} holds parameters of several dtypes: {seen['parameter_dtypes']}",
                _STOPPED,
            )
    share = observed[0]["local_parameter_bytes"] / observed[0]["whole_model_bytes"]
    engine, units = observed[0]["engine"], observed[0]["sharded_units"]
    return "ok", f"{engine}: {units} units, each of {size} ranks holds {share:.0%}", ""


def _rank(rank: int, size: int, kind: str, scratch: str) -> None:
    """Run the checks on one rank and write its report, even if they fail."""
    report: RankReport = {}
    try:
        report = _examine(rank, size, kind, scratch)
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        report = {"error": f"rank {rank}: {type(error).__name__}: {text[0]}"}
        raise
    finally:
        (Path(scratch) / f"{rank}.json").write_text(json.dumps(report))


def _examine(rank: int, size: int, kind: str, scratch: str) -> RankReport:
    torch.set_num_threads(1)
    device = torch.device(kind, rank) if kind != "cpu" else torch.device("cpu")
    if kind != "cpu":
        torch.cuda.set_device(device)
    before = _used_bytes(device)
    backend = "gloo" if kind == "cpu" else "nccl"
    dist.init_process_group(
        backend,
        init_method=f"file://{scratch}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_SECONDS / 2),
    )
    measured: Measurements = {}
    _check_collectives(rank, size, device)
    if kind != "cpu":
        measured["communicator_bytes"] = _used_bytes(device) - before
        measured["all_reduce_bytes_per_second"] = _all_reduce_speed(size, device)
    observed = _observe_sharding(rank, size, device, scratch)
    dist.destroy_process_group()
    return {"backend": backend, "measured": measured, "observed": observed}


def _check_collectives(rank: int, size: int, device: torch.device) -> None:
    values = torch.full((size,), float(rank + 1), device=device)
    total = size * (size + 1) / 2
    dist.all_reduce(values)
    assert values.tolist() == [total] * size, f"all-reduce gave {values.tolist()}"
    gathered = torch.empty(size, device=device)
    dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank), device=device))
    assert gathered.tolist() == [float(r) for r in range(size)], (
        f"all-gather gave {gathered.tolist()}"
    )
    scattered = torch.empty(1, device=device)
    dist.reduce_scatter_tensor(scattered, torch.arange(size, dtype=torch.float32, device=device))
    assert scattered.item() == rank * size, f"reduce-scatter gave {scattered.item()}"
    # RCCL has been seen to deadlock with a second communicator (ROCm/rccl#2191).
    dist.all_reduce(torch.ones(1, device=device), group=dist.new_group())


def _observe_sharding(
    rank: int, size: int, device: torch.device, scratch: str
) -> ObservedShardingDict:
    stopping = StopWatch(RunDirectory(Path(scratch)), rank)
    world = World(rank=rank, size=size, device=device, stopping=stopping)
    with torch.device("meta"):
        classifier = build_classifier(
            build_config(_SHAPE, vocab_size=512, pad_token_id=0),
            [Head(name="check", labels=["a", "b"])],
        )
    compute = "bfloat16" if device.type != "cpu" else "float32"
    recipe = Recipe.model_validate({"compute": compute, "reduce": compute})
    sharded = shard_classifier(classifier, recipe, world)
    initialise(sharded, seed=0)  # verifies by checksum that every parameter was filled
    return observe_sharding(sharded, world)


def _all_reduce_speed(size: int, device: torch.device) -> int | None:
    """Return the bus bandwidth of a large all-reduce: 2 (n - 1) / n of its bytes per second."""
    if size < 2:
        return None
    values = torch.zeros(_ALL_REDUCE_BYTES // 4, device=device)
    dist.all_reduce(values)
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        dist.all_reduce(values)
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - started) / 5
    return round(2 * (size - 1) / size * _ALL_REDUCE_BYTES / seconds)


def _used_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _read(path: Path) -> RankReport:
    try:
        found: RankReport = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found
