"""The command line and the environment under which torchrun starts the ranks of one attempt."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.shared.jobs.planning.auto_choices import num_cores, num_ranks
from services.shared.jobs.spec import Resources
from services.shared.launch.devices import (
    DeviceKind,
    allowed_numa_nodes,
    device_kind,
    numa_binding_unsupported_reason,
    numa_nodes,
)
from services.shared.launch.processes import NUMA_NODES, RUN_MARK, guarded
from services.shared.launch.secret_variables import is_secret

# torch 2.5 reads only the name of its own build, later versions the last one; so all get one value.
_ALLOCATOR_NAMES = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True)
class Launch:
    """The command and environment to start, and warnings about what could not be set up."""

    command: list[str]
    env: dict[str, str]
    warnings: list[str]


def plan_launch(
    module: str,
    run_dir: Path,
    *,
    resources: Resources,
    environment: Mapping[str, str],
    offloads: bool = False,
) -> Launch:
    """Return how to run `module RUN_DIR` on every rank of one node.

    Each rank runs behind the guard: it dies with torchrun even when that is killed, and is bound to
    the NUMA node of its card where numactl may be used.
    """
    kind = device_kind(resources.device)
    nodes, warnings = _bindings(kind, resources)
    rank = guarded([sys.executable, "-u", "-m", module, str(run_dir)])
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"),
        # A container's own host name often does not resolve.
        *("--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(num_ranks(resources)), "--max-restarts", "0"),
        *("--log-dir", str(run_dir / "torchrun")),
        *rank,
    ]
    env = rank_environment(resources, environment=environment, offloads=offloads)
    env[RUN_MARK] = str(run_dir)
    if nodes:
        env[NUMA_NODES] = ",".join(nodes)
    return Launch(command=command, env=env, warnings=warnings)


def plan_preparation(
    run_dir: Path, *, resources: Resources, environment: Mapping[str, str]
) -> Launch:
    """Return how to find out, before the ranks start, what a spec leaves to the machine."""
    env = rank_environment(resources, environment=environment)
    env |= {
        RUN_MARK: str(run_dir),
        "TOKENIZERS_PARALLELISM": "true",
    }  # no ranks share the cores yet
    command = [sys.executable, "-u", "-m", "services.shared.training.prepare", str(run_dir)]
    return Launch(command=command, env=env, warnings=[])


def rank_environment(
    resources: Resources, *, environment: Mapping[str, str], offloads: bool = False
) -> dict[str, str]:
    """Return the environment of the ranks: the worker's own, completed for the kind of device.

    Values set by the operator are kept, except secrets and those known to break device initialisation.
    """
    kind = device_kind(resources.device)
    env = {name: value for name, value in environment.items() if not is_secret(name, value)}
    env.update(PYTHONFAULTHANDLER="1")
    env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.setdefault("HF_HUB_OFFLINE", "1")
    env.setdefault("TOKENIZERS_PARALLELISM", "false")
    busy_host = kind is DeviceKind.CPU or offloads
    threads = max(1, num_cores() // num_ranks(resources)) if busy_host else 1
    env.setdefault("OMP_NUM_THREADS", str(threads))
    _select_devices(env, kind, resources.visible_devices)
    if kind in (DeviceKind.DCU, DeviceKind.ROCM):
        # RCCL itself warns of hangs and low speed without it.
        env.setdefault("HSA_FORCE_FINE_GRAIN_PCIE", "1")
    if kind is DeviceKind.CPU:
        # Tensors of 2 MiB and more on huge pages. Each step allocates the gradient of the embedding anew, and
        # filling 384 MB in pages of 4 KiB took 6 times the system time of the computation on it.
        env.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    else:
        _set_allocator(env, kind)
    return env


def _select_devices(env: dict[str, str], kind: DeviceKind, devices: list[int] | None) -> None:
    """Name the cards once, in the variable that the kind's runtime reads.

    An empty CUDA_VISIBLE_DEVICES aborts a DCU process, and ROCR together with HIP hides every card
    (DTK 26.04); on AMD, ROCR set by the operator only renumbers the cards.
    """
    if not env.get("CUDA_VISIBLE_DEVICES") or kind is DeviceKind.DCU:
        env.pop("CUDA_VISIBLE_DEVICES", None)
    if kind is DeviceKind.DCU:
        env.pop("ROCR_VISIBLE_DEVICES", None)
    if not env.get("HIP_VISIBLE_DEVICES"):
        env.pop("HIP_VISIBLE_DEVICES", None)
    if devices is None:
        return
    chosen = ",".join(str(device) for device in devices)
    if kind in (DeviceKind.DCU, DeviceKind.ROCM):
        env["HIP_VISIBLE_DEVICES"] = chosen
        env.pop("CUDA_VISIBLE_DEVICES", None)
    elif kind is DeviceKind.CUDA:
        env["CUDA_VISIBLE_DEVICES"] = chosen
    elif kind is DeviceKind.NPU:
        env["ASCEND_RT_VISIBLE_DEVICES"] = chosen


def _set_allocator(env: dict[str, str], kind: DeviceKind) -> None:
    """Give every allocator variable the same value.

    Only CUDA gets a default: ROCm up to torch 2.10 ignores expandable segments, and later builds can
    hang with them (pytorch#192259).
    """
    given = next((env[name] for name in _ALLOCATOR_NAMES if env.get(name)), None)
    if given is None and kind is DeviceKind.CUDA:
        given = "expandable_segments:True"
    for name in _ALLOCATOR_NAMES:
        if given is None:
            env.pop(name, None)
        else:
            env[name] = given


def _bindings(kind: DeviceKind, resources: Resources) -> tuple[list[str], list[str]]:
    """Return the NUMA node of each local rank ('' for none), and why there is none."""
    if kind in (DeviceKind.CPU, DeviceKind.NPU):
        return [], []
    obstacle = numa_binding_unsupported_reason()
    if obstacle is not None:
        return [], [f"Ranks are not bound to NUMA nodes: {obstacle}."]
    known = numa_nodes(kind)
    if not known:
        return [], ["Ranks are not bound to NUMA nodes: the vendor's tool does not report them."]
    # Local rank k may be card 4: a subset of the cards is renumbered.
    cards = resources.visible_devices or list(range(num_ranks(resources)))
    usable = allowed_numa_nodes()
    nodes = [known.get(card) for card in cards]
    return [str(node) if node in usable else "" for node in nodes], []
