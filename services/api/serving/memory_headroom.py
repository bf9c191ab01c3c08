"""Whether memory holds another student beside those that serve. Torch-free."""

from __future__ import annotations

from pathlib import Path

import psutil

from services.api.serving.promotion import StudentRefused
from services.api.serving.settings import ServingDtype, ServingSettings
from services.shared.memory.architecture.safetensors_headers import read_header

# Anonymous memory at the peak of loading beside a student that serves, over the size of the weights in
# the type they serve in: 1.14 in float32 from bfloat16 files, with what `memory.trim` gives back
# meanwhile (Qwen3-0.6B shape, torch 2.13, Linux).
PEAK_OVER_SERVED = 1.25
# The same of preparing for 8 bits, over the weights in float32: 1.32.
PREPARING_OVER_FLOAT32 = 1.4

_CGROUP = Path("/sys/fs/cgroup")
_CPUINFO = Path("/proc/cpuinfo")


def check_memory(
    directory: Path, settings: ServingSettings, *, available: int | None = None
) -> None:
    """Raise StudentRefused (transient) where loading `directory` might exhaust the host's memory.

    `available` bytes are those of the machine if left out.
    """
    served = served_bytes(directory, bytes_per_weight=bytes_per_weight(settings))
    needed = int(served * PEAK_OVER_SERVED) + settings.memory_reserve_bytes
    if available is None:
        available = available_bytes()
    if needed > available:
        raise StudentRefused(
            f"Loading needs about {needed >> 20} MiB (the weights as they serve, {served >> 20} MiB, "
            f"{PEAK_OVER_SERVED} times, and {settings.memory_reserve_bytes >> 20} MiB in reserve); "
            f"{available >> 20} MiB are available.",
            transient=True,
        )


def memory_to_prepare(directory: Path, settings: ServingSettings) -> int:
    """Return the bytes that must be free for `directory` to be prepared for 8-bit serving."""
    weights = served_bytes(directory, bytes_per_weight=4)
    return int(weights * PREPARING_OVER_FLOAT32) + settings.memory_reserve_bytes


def served_bytes(directory: Path, *, bytes_per_weight: int) -> int:
    """Return the size of an artifact's weights in the type they serve in; 0 without weights."""
    weights = sum(map(_count_weights, directory.glob("*.safetensors")))
    return weights * bytes_per_weight


def bytes_per_weight(settings: ServingSettings) -> int:
    """Return 2 for students that serve in bfloat16 and 4 for float32.

    An accelerator under `auto` counts as the processor: without torch nobody knows that it is there.
    """
    if settings.dtype is ServingDtype.AUTO:
        return 2 if settings.device.startswith("cuda") or bf16_is_faster() else 4
    return 2 if settings.dtype is ServingDtype.BFLOAT16 else 4


def bf16_is_faster(cpuinfo: Path = _CPUINFO) -> bool:
    """Say whether the processor multiplies bfloat16 faster than float32: with AMX, or AMD's AVX512_BF16.

    Intel's AVX512_BF16 without AMX, as guests see it whose host hides AMX, does not: products of 64 to
    512 tokens ran at 0.52 to 0.58 of float32's speed (Emerald Rapids, torch 2.13).
    """
    if not cpuinfo.exists():
        return False
    told = cpuinfo.read_text()
    return "amx_bf16" in told or ("avx512_bf16" in told and "AuthenticAMD" in told)


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Return what a process may still take: of the machine or of its container, the smaller."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    # The kernel takes cached files back before it kills anybody.
    return min(available, max(0, limit - used + _cached_files(cgroup / "memory.stat")))


def _count_weights(file: Path) -> int:
    return sum(tensor.num_elements for tensor in read_header(file).tensors.values())


def _cached_files(stat: Path) -> int:
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit
