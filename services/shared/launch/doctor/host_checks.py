"""Checks of the host: memory, shared memory, limits, processors, the kernel's counters."""

from __future__ import annotations

import os
import re
import resource

from services.shared.jobs.planning.auto_choices import num_cores
from services.shared.launch.devices import (
    DeviceKind,
    allowed_numa_nodes,
    numa_binding_unsupported_reason,
)
from services.shared.launch.doctor.machine import (
    Finding,
    Machine,
    failed,
    not_applicable,
    ok,
    warning,
)
from services.shared.launch.oom_counter import OomCounters
from services.shared.memory.cgroup import container_limit_bytes, host_memory_bytes

_GIB = 2**30
# Docker gives 64 MiB by default; RCCL and NCCL take shared memory for each pair of ranks.
_LEAST_SHARED_BYTES = _GIB
# The vendor's recommended fix for failing allocations on BW cards.
_LEAST_MAP_COUNT = 262_144


def check_host(machine: Machine) -> list[Finding]:
    """Return the findings on the host; few depend on the kind of device."""
    return [
        _memory(machine),
        _shared_memory(machine),
        _locked_memory(machine),
        _core_dumps(),
        _map_count(machine),
        _processors(machine),
        _numa(machine),
        _oom_counter(machine),
    ]


def _memory(machine: Machine) -> Finding:
    name = "host memory"
    found, limit = host_memory_bytes(machine.root), container_limit_bytes(machine.root)
    if found is None:
        return warning(name, "cannot be read", "Declare resources.host_memory in job specs.")
    limited = "" if limit is None or limit > found else ", the limit of this container"
    return ok(name, f"{found / _GIB:.1f} GiB{limited}")


def _shared_memory(machine: Machine) -> Finding:
    name = "shared memory"
    try:
        stats = os.statvfs(machine.root / "dev/shm")
    except OSError:
        return failed(name, "/dev/shm is missing", "Mount a tmpfs there (container: shm_size).")
    size = stats.f_frsize * stats.f_blocks
    if size < _LEAST_SHARED_BYTES:
        return warning(
            name,
            f"/dev/shm has {size / 2**20:.0f} MiB: collectives and data loaders may fail with a bus "
            "error",
            "Start the container with --shm-size 64g or --ipc host.",
        )
    return ok(name, f"/dev/shm has {size / _GIB:.1f} GiB")


def _locked_memory(machine: Machine) -> Finding:
    name = "locked memory"
    if machine.kind is DeviceKind.CPU:
        return not_applicable(name, "no accelerator pins host memory")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY:
        return warning(
            name,
            f"memlock is limited to {limit // 1024} KiB: pinned buffers and RDMA may fail",
            "ulimit -l unlimited (container: ulimits: memlock: -1).",
        )
    return ok(name, "unlimited")


def _core_dumps() -> Finding:
    """A crash on a DCU dumps 2 GB of core into the working directory; ranks dump none."""
    limit = resource.getrlimit(resource.RLIMIT_CORE)[0]
    here = "off" if limit == 0 else "on for other programs (ulimit -c 0 stops them)"
    return ok("core dumps", f"ranks dump none; here they are {here}")


def _map_count(machine: Machine) -> Finding:
    name = "memory maps"
    if not machine.is_hip:
        return not_applicable(name, "only HIP devices reach this limit")
    text = machine.read("proc/sys/vm/max_map_count").strip()
    if text.isdigit() and int(text) < _LEAST_MAP_COUNT:
        return warning(
            name,
            f"vm.max_map_count is {text}",
            f"On the host: sysctl -w vm.max_map_count={_LEAST_MAP_COUNT}.",
        )
    return ok(name, f"vm.max_map_count is {text or 'not readable'}")


def _processors(machine: Machine) -> Finding:
    found = f"{num_cores()} cores for ranks"
    model = re.search(r"^model name\s*:\s*(.+)$", machine.read("proc/cpuinfo"), re.MULTILINE)
    return ok("processors", f"{found}, {model.group(1)}" if model else found)


def _numa(machine: Machine) -> Finding:
    """Check whether ranks will be bound; the golden case met a missing numactl."""
    name = "numactl"
    if machine.kind is DeviceKind.CPU:
        return not_applicable(name, "ranks on the CPU are not bound to the nodes of cards")
    obstacle = numa_binding_unsupported_reason(machine.read("proc/self/status"))
    if obstacle is not None:
        return warning(
            name,
            f"ranks run unbound: {obstacle}",
            "Install numactl and give the container SYS_NICE; training works without, somewhat "
            "slower on hosts with several NUMA nodes.",
        )
    nodes = sorted(allowed_numa_nodes(machine.read("proc/self/status")))
    return ok(name, f"ranks are bound to the nodes of their cards, among {nodes}")


def _oom_counter(machine: Machine) -> Finding:
    """A rank killed for memory leaves no message; only these counters distinguish it from any other kill."""
    counters = OomCounters(root=machine.root)
    counters.track([os.getpid()])
    if counters.killed() is None:
        return warning(
            "kernel kill counter",
            "neither the cgroup's oom_kill nor /proc/vmstat can be read",
            "A rank killed by the kernel will be reported as crashed; mount /sys/fs/cgroup.",
        )
    return ok("kernel kill counter", "out-of-memory kills can be distinguished from other kills")
