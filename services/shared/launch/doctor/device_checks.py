"""Checks of accelerators without torch: device files, drivers, environment, memory in use."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from services.shared.launch.devices import DeviceKind, first_json_object
from services.shared.launch.doctor.machine import (
    Finding,
    Machine,
    failed,
    not_applicable,
    numbers,
    ok,
    warning,
)

# The minimum driver of each DTK, from the vendor's table (toolkit compatibility list, 2026).
_LEAST_DRIVERS = (
    ((26, 4), (6, 3, 30)),
    ((25, 4, 2), (6, 3, 16)),
    ((25, 4, 1), (6, 3, 6)),
    ((25, 4), (6, 3, 6)),
    ((24, 4), (5, 7, 1)),
)
# An idle card reports 3 MiB (vendor's fixture); a context alone takes about 90 MiB.
_IDLE_MIB = 64
_ALLOCATOR_NAMES = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def check_devices(machine: Machine) -> list[Finding]:
    """Return the findings on devices, their driver and the environment of this process."""
    return [
        _files(machine),
        _driver(machine),
        _runtime(machine),
        _selection(machine),
        _fine_grain(machine),
        _allocator(machine),
        _debugging(machine),
        _tuning(machine),
        _idle(machine),
        _iommu(machine),
        _kernel_cache(machine),
    ]


def _files(machine: Machine) -> Finding:
    name = "device files"
    if machine.kind is DeviceKind.CPU:
        return not_applicable(name, "neither /dev/kfd nor /dev/nvidiactl: this is a CPU machine")
    wanted = {
        DeviceKind.DCU: ["dev/kfd", "dev/dri"],
        DeviceKind.ROCM: ["dev/kfd", "dev/dri"],
    }.get(machine.kind, ["dev/nvidiactl", "dev/nvidia-uvm"])
    missing = [f"/{path}" for path in wanted if not machine.exists(path)]
    if missing:
        return failed(
            name, f"missing: {', '.join(missing)}", "Pass them to the container (--device)."
        )
    closed = [f"/{p}" for p in wanted if not os.access(machine.root / p, os.R_OK | os.W_OK)]
    if closed:
        return failed(
            name,
            f"not readable and writable for this user: {', '.join(closed)}",
            "Add the host's numeric video and render groups (getent group video render); names "
            "resolve in the image, where they may be others.",
        )
    return ok(name, ", ".join(f"/{path}" for path in wanted))


def _driver(machine: Machine) -> Finding:
    name = "driver"
    if machine.kind is DeviceKind.CUDA:
        output = machine.run_tool(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        )
        return (
            ok(name, f"NVIDIA {output.split()[0]}") if output.split() else _no_output("nvidia-smi")
        )
    if machine.kind is not DeviceKind.DCU:
        return not_applicable(name, "only Hygon's driver must match a DTK")
    output = machine.run_tool(["hy-smi", "--showdriverversion"])
    found = re.search(r"Driver Version\W+(\d+\.\d+\.\d+)", output)
    dtk = machine.dtk_version()
    if found is None or dtk is None:
        return _no_output("hy-smi --showdriverversion") if dtk else _no_dtk(name)
    least = next((least for since, least in _LEAST_DRIVERS if numbers(dtk) >= since), ())
    if numbers(found.group(1)) < least:
        return failed(
            name,
            f"driver {found.group(1)} under DTK {dtk}, which needs {'.'.join(map(str, least))}",
            "Update the driver on the host, or use an image with an older DTK.",
        )
    return ok(name, f"driver {found.group(1)}, DTK {dtk}")


def _no_output(tool: str) -> Finding:
    return warning("driver", f"{tool} reports nothing", "Mount the driver's tools (/opt/hyhal).")


def _no_dtk(name: str) -> Finding:
    return failed(
        name, "no DTK below /opt/dtk", "Use a DTK base image; never install DTK in a container."
    )


def _runtime(machine: Machine) -> Finding:
    """Check the runtime's directories: without them, torch on a DCU finds no device and reports no error."""
    name = "DTK environment"
    if machine.kind is not DeviceKind.DCU:
        return not_applicable(name, "DTK is Hygon's")
    if not (machine.exists("opt/hyhal") or machine.exists("usr/local/hyhal")):
        return failed(
            name,
            "/opt/hyhal is not mounted: the runtime counts no device",
            "Mount the host's driver directory: -v /opt/hyhal:/opt/hyhal:ro.",
        )
    paths = machine.env.get("LD_LIBRARY_PATH", "")
    if "dtk" not in paths:
        return failed(
            name,
            "LD_LIBRARY_PATH contains no directory of DTK: importing torch fails (libgalaxyhip.so.5)",
            "source /opt/dtk/env.sh in the entrypoint (without set -u), also for health checks.",
        )
    return ok(name, "hyhal is mounted and DTK's libraries are on the path")


def _selection(machine: Machine) -> Finding:
    name, env = "device selection", machine.env
    if machine.kind is DeviceKind.CPU:
        return not_applicable(name, "there is no device to select")
    if machine.kind is DeviceKind.DCU and {"ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"} <= set(
        env
    ):
        return failed(
            name,
            "ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES are both set: torch sees no device",
            "Unset ROCR_VISIBLE_DEVICES. (Ranks of Stillhouse get HIP_VISIBLE_DEVICES alone.)",
        )
    if env.get("CUDA_VISIBLE_DEVICES") == "":
        return failed(
            name,
            "CUDA_VISIBLE_DEVICES is set and empty: a DCU process aborts, a CUDA one sees nothing",
            "Unset it; in compose, ${VAR:-} produces exactly this.",
        )
    chosen = {k: v for k, v in env.items() if k.endswith("_VISIBLE_DEVICES")}
    return ok(name, ", ".join(f"{k}={v}" for k, v in sorted(chosen.items())) or "all devices")


def _fine_grain(machine: Machine) -> Finding:
    name = "fine-grained PCIe"
    if not machine.is_hip:
        return not_applicable(name, "HSA_FORCE_FINE_GRAIN_PCIE is for HIP devices")
    if machine.env.get("HSA_FORCE_FINE_GRAIN_PCIE", "1") != "1":
        return warning(
            name,
            "HSA_FORCE_FINE_GRAIN_PCIE is not 1: RCCL may hang",
            "Unset it; ranks get 1.",
        )
    return ok(name, "ranks get HSA_FORCE_FINE_GRAIN_PCIE=1")


def _allocator(machine: Machine) -> Finding:
    name = "allocator settings"
    if machine.kind is DeviceKind.CPU:
        return not_applicable(name, "the CPU has no caching allocator")
    given = {n: machine.env[n] for n in _ALLOCATOR_NAMES if machine.env.get(n)}
    if len(set(given.values())) > 1:
        return warning(
            name,
            f"the names disagree: {given}",
            "Set one of them; ranks get its value under all three names.",
        )
    if machine.is_hip and any("expandable_segments" in value for value in given.values()):
        return warning(
            name,
            "expandable_segments is ignored on HIP up to torch 2.10, and later builds can hang",
            "Use max_split_size_mb or garbage_collection_threshold instead.",
        )
    return ok(name, ", ".join(f"{k}={v}" for k, v in given.items()) or "torch's own")


def _debugging(machine: Machine) -> Finding:
    name = "debug variables"
    silenced = [
        f"{key}={machine.env[key]}"
        for key in ("TORCH_CPP_LOG_LEVEL", "GLOG_minloglevel")
        if key in machine.env
    ]
    if machine.env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        return warning(
            name,
            "TORCH_DISTRIBUTED_DEBUG=DETAIL wraps every collective, hides some RCCL deadlocks and is slow",
            "Unset it for real runs.",
        )
    if silenced:
        return warning(
            name, f"log lines are hidden: {', '.join(silenced)}", "Unset them while debugging."
        )
    return ok(name, "none set")


def _tuning(machine: Machine) -> Finding:
    name = "collective tuning"
    if machine.kind is DeviceKind.CPU:
        return not_applicable(name, "gloo has no such variables")
    preset = sorted(key for key in machine.env if key.startswith(("NCCL_", "RCCL_")))
    if machine.is_hip and preset:
        return warning(
            name,
            f"preset: {', '.join(preset)}; published values are tuned for other cards",
            "Unset NCCL_* and measure before setting any on one node.",
        )
    return ok(name, ", ".join(preset) or "none set, as it should be on one node")


def _idle(machine: Machine) -> Finding:
    """Memory in use before the checks: another job, or a killed one that still holds it."""
    name = "memory in use"
    used = _used_mib(machine)
    if machine.kind is DeviceKind.CPU:
        return not_applicable(name, "no device memory")
    if not used:
        return warning(name, "the vendor's tool does not report it", "Check it manually.")
    busy = {card: mib for card, mib in used.items() if mib > _IDLE_MIB}
    if busy:
        shown = ", ".join(f"card {card}: {mib:.0f} MiB" for card, mib in busy.items())
        return warning(
            name,
            f"in use before the checks started: {shown}",
            "Find the process (hy-smi --showpids, nvidia-smi); a killed job may still hold memory.",
        )
    return ok(name, f"{len(used)} cards idle")


def _used_mib(machine: Machine) -> dict[str, float]:
    if machine.kind is DeviceKind.CUDA:
        table = machine.run_tool(
            ["nvidia-smi", "--query-gpu=index,memory.used", "--format=csv,noheader,nounits"]
        )
        rows = [line.split(",") for line in table.splitlines() if line.count(",") == 1]
        return {card.strip(): float(used) for card, used in rows if used.strip().isdigit()}
    if not machine.is_hip:
        return {}
    tool = "hy-smi" if machine.kind is DeviceKind.DCU else "rocm-smi"
    return parse_used_memory(machine.run_tool([tool, "--showmeminfo", "vram", "--json"]))


def parse_used_memory(text: str) -> dict[str, float]:
    """Return MiB in use by card; Hygon's tool prints MiB, AMD's prints bytes, both as strings."""
    found: dict[str, float] = {}
    for name, values in first_json_object(text).items():
        card = re.search(r"\d+", str(name))
        if card is None or not isinstance(values, Mapping):
            continue
        for key, value in values.items():
            amount = _amount(key, value)
            if amount is not None:
                found[card.group()] = amount
    return found


def _amount(key: str, value: Any) -> float | None:
    label, number = key.lower(), str(value).strip()
    if "used" not in label or not number.isdigit():
        return None
    return int(number) if "(mib)" in label else int(number) / 2**20


def _iommu(machine: Machine) -> Finding:
    name = "IOMMU"
    if machine.kind is not DeviceKind.DCU:
        return not_applicable(name, "a problem of PCIe DCU cards")
    groups = machine.root / "sys/kernel/iommu_groups"
    translating = groups.is_dir() and any(groups.iterdir())
    if translating and "iommu=pt" not in machine.read("proc/cmdline"):
        return warning(
            name,
            "the IOMMU translates: PCIe cards (K100_AI) may communicate slowly, hang or disappear",
            "Switch IOMMU and ACS off in the BIOS, or boot with iommu=pt; OAM cards are not affected.",
        )
    return ok(name, "does not slow down communication")


def _kernel_cache(machine: Machine) -> Finding:
    name = "kernel cache"
    if not machine.is_hip:
        return not_applicable(name, "MIOpen's cache is for HIP devices")
    path = machine.env.get("MIOPEN_USER_DB_PATH")
    if path is None:
        return warning(
            name,
            "MIOpen's cache is in the home directory: kept over a change of DTK or card, it gives "
            "wrong numbers",
            "Set MIOPEN_USER_DB_PATH to a node-local directory named by DTK version and architecture.",
        )
    return ok(name, f"MIOPEN_USER_DB_PATH={path}")
