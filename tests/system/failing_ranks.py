"""Ranks of a real teacher job that fail at the start of step 2, in the way that the job's name says.

    torchrun ... -m failing_ranks RUN_DIR

Everything but the fault is production code: the loop, the probe, the failure files.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from services.shared.jobs.run_directory import RunDirectory, RunInput
from services.shared.jobs.spec import Recipe
from services.shared.training.process import World
from services.shared.training.sharding import shard
from services.trainer import finetune, main

MIB = 2**20
# What a rank may take in step 2 beyond what it holds: between the plans of the two recipes.
HEADROOM_BYTES = 450 * MIB
# More than any machine has: torch's own allocator refuses it and says so.
IMPOSSIBLE_BYTES = 2**50
ECHO_AFTER = timedelta(seconds=3)
LINGER_SECONDS = 60

_run = RunDirectory(Path(sys.argv[1]))


def exceed_the_address_space(_rank: int) -> None:
    """Let the kernel refuse this rank more address space than the headroom, as `ulimit -v` does."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + HEADROOM_BYTES,) * 2)


def be_killed_by_the_kernel(rank: int) -> None:
    """Fill the memory cgroup of rank 1; without one, count an OOM kill and die by SIGKILL."""
    if rank != 1:
        return
    cgroup = os.environ.get("TEST_CGROUP")
    if cgroup is None:
        Path(os.environ["TEST_COUNTER"]).write_text("oom_kill 1\n")
        os.kill(os.getpid(), signal.SIGKILL)
        return
    used = int(Path(cgroup, "memory.usage_in_bytes").read_text())
    Path(cgroup, "memory.limit_in_bytes").write_text(str(used + 32 * MIB))
    held = []
    while True:
        held.append(torch.ones(16 * MIB))


def fail_alone(rank: int) -> None:
    """Let rank 1 run out of memory; the others wait in a collective until that times out."""
    if rank == 1:
        torch.empty(IMPOSSIBLE_BYTES, dtype=torch.uint8)
    dist.distributed_c10d._set_pg_timeout(ECHO_AFTER)


def linger() -> None:
    """Stay alive until the others have failed, so that torchrun sees their timeouts before the cause."""
    others = [_run.failure_file(rank) for rank in range(int(os.environ["WORLD_SIZE"]) - 1)]
    deadline = time.monotonic() + LINGER_SECONDS
    while not all(file.exists() for file in others) and time.monotonic() < deadline:
        time.sleep(0.05)


def leave_parameters_whole() -> None:
    """Do what a wrong configuration does: every rank holds everything.

    FSDP2 wraps nothing then; FSDP1 forms its units and shards none of them.
    """
    wrap = shard._fsdp1

    def whole(classifier: Any, own: list[Any], recipe: Recipe, world: World) -> Any:
        return wrap(classifier, own, recipe.model_copy(update={"sharding": "none"}), world)

    shard._fsdp1 = whole
    shard._fsdp2 = lambda classifier, *_: classifier.to_empty(device="cpu")


def at_the_second_step(fault: Callable[[int], None]) -> None:
    """Inject the fault once, when the loop begins its second step or a later one."""
    seed_step = finetune.seed_step  # type: ignore[attr-defined]
    injected: list[int] = []

    def seeded(seed: int, step: int, rank: int) -> None:
        seed_step(seed, step, rank)
        if step >= 1 and not injected:
            injected.append(step)
            fault(rank)

    finetune.seed_step = seeded  # type: ignore[attr-defined]


def run() -> None:
    """Prepare the fault, then run as a rank of a teacher job."""
    name = RunInput.model_validate_json(_run.spec.read_bytes()).spec.name
    assert name is not None
    if name == "leave_parameters_whole":
        leave_parameters_whole()
    else:
        at_the_second_step(globals()[name])
    if os.environ["RANK"] == "1" and "TEST_CGROUP" in os.environ:
        Path(os.environ["TEST_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
    try:
        main.main()
    except BaseException:
        if name == "fail_alone" and os.environ["RANK"] == "1":
            linger()
        raise


if __name__ == "__main__":
    run()
