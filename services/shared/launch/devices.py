"""The kind of device of this machine, and its NUMA nodes, from device files and vendor tools."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from enum import Enum
from pathlib import Path


class DeviceKind(str, Enum):
    """A family of devices with one runtime and one way of naming cards."""

    CPU = "cpu"
    DCU = "dcu"
    ROCM = "rocm"
    CUDA = "cuda"
    NPU = "npu"

    __str__ = str.__str__


_PREFIXES = {
    "cpu": DeviceKind.CPU,
    **dict.fromkeys(("k100", "k500", "bw", "z100", "dcu", "hcu"), DeviceKind.DCU),
    **dict.fromkeys(("mi", "rocm"), DeviceKind.ROCM),
    **dict.fromkeys(("910", "ascend"), DeviceKind.NPU),
}


def device_kind(device: str) -> DeviceKind:
    """Return the family of a device by its name (`stillhouse plan --device`); CUDA unless known."""
    for prefix, kind in _PREFIXES.items():
        if device.lower().startswith(prefix):
            return kind
    return DeviceKind.CUDA


def detect_device_kind(root: Path = Path("/")) -> DeviceKind:
    """Return the family of this machine's devices, according to its device files.

    A DCU and an AMD card share /dev/kfd; the vendor's driver directory distinguishes them.
    """
    if (root / "dev/kfd").exists():
        hygon = any((root / path).exists() for path in ("opt/hyhal", "opt/dtk", "usr/local/hyhal"))
        return DeviceKind.DCU if hygon or (root / "dev/mkfd").exists() else DeviceKind.ROCM
    if (root / "dev/nvidiactl").exists():
        return DeviceKind.CUDA
    return DeviceKind.CPU


def numa_nodes(kind: DeviceKind) -> dict[int, int]:
    """Return the NUMA node of each physical card from the vendor's tool; {} where it does not report them."""
    if kind is DeviceKind.DCU:
        return parse_numa_topology(run_tool(["hy-smi", "--showtoponuma", "--json"]))
    if kind is DeviceKind.ROCM:
        return parse_numa_topology(run_tool(["rocm-smi", "--showtoponuma", "--json"]))
    if kind is DeviceKind.CUDA:
        return _nvidia_nodes(
            run_tool(["nvidia-smi", "--query-gpu=index,pci.bus_id", "--format=csv,noheader"])
        )
    return {}


def parse_numa_topology(text: str) -> dict[int, int]:
    """Read `{"card0": {"(Topology) Numa Node": "0"}, ...}`, noise before it and ANSI codes allowed."""
    nodes = {}
    for name, values in first_json_object(text).items():
        card = re.search(r"(\d+)", str(name))
        if card is None or not isinstance(values, Mapping):
            continue
        for key, value in values.items():
            if "numa node" in str(key).lower() and str(value).strip().isdigit():
                nodes[int(card.group(1))] = int(value)
    return nodes


def first_json_object(text: str) -> dict[str, object]:
    """Return the first JSON object in a tool's output, or {}; warnings may precede it."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    decoder = json.JSONDecoder()
    for match in re.finditer(r"\{", plain):
        try:
            value, _ = decoder.raw_decode(plain, match.start())
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def numa_binding_unsupported_reason(status: str | None = None) -> str | None:
    """Return why ranks cannot be bound to NUMA nodes here, or None where they can.

    Containers refuse the system calls behind numactl where CAP_SYS_NICE is not among the capabilities
    in the bounding set; the process need not hold it (Docker 20.10, as user 10001: CapEff 0, bound).
    """
    if shutil.which("numactl") is None:
        return "numactl is not installed"
    text = status if status is not None else Path("/proc/self/status").read_text()
    held = re.search(r"^CapBnd:\s*([0-9a-f]+)", text, re.MULTILINE)
    if held is None or not int(held.group(1), 16) >> 23 & 1:  # CAP_SYS_NICE, linux/capability.h
        return "CAP_SYS_NICE cannot be had (container: cap_add SYS_NICE)"
    return None


def allowed_numa_nodes(status: str | None = None) -> set[int]:
    """Return the NUMA nodes whose memory this process may use (its cpuset)."""
    text = status if status is not None else Path("/proc/self/status").read_text()
    found = re.search(r"^Mems_allowed_list:\s*(\S+)", text, re.MULTILINE)
    nodes: set[int] = set()
    for part in found.group(1).split(",") if found else []:
        first, _, last = part.partition("-")
        nodes.update(range(int(first), int(last or first) + 1))
    return nodes


def find_tool(name: str) -> str | None:
    """Return the path of a vendor's tool; Hygon's is outside the PATH."""
    return shutil.which(name) or shutil.which(name, path="/opt/hyhal/bin:/usr/local/hyhal/bin")


def run_tool(command: list[str]) -> str:
    """Return a vendor tool's output, or '' where it is missing, fails to start or times out."""
    path = find_tool(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, check=False, timeout=30
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def _nvidia_nodes(table: str) -> dict[int, int]:
    nodes = {}
    for line in table.splitlines():
        index, _, bus = line.partition(",")
        # nvidia-smi prints 00000000:0A:00.0, the kernel names the device 0000:0a:00.0.
        address = bus.strip().lower().removeprefix("0000")
        try:
            node = int(Path("/sys/bus/pci/devices", address, "numa_node").read_text())
        except (OSError, ValueError):
            continue
        if node >= 0:
            nodes[int(index)] = node
    return nodes
