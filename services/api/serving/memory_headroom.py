"""Whether there is enough memory to load another student next to those that serve. Torch-free."""

from __future__ import annotations

from pathlib import Path

import psutil

from services.api.serving.promotion import StudentRefused
from services.api.serving.settings import ServingDtype, ServingSettings
from services.shared.jobs.planning.auto_choices import bf16_is_faster
from services.shared.memory.architecture.safetensors_headers import read_header

# Peak anonymous memory while loading, over the size of the weights in their serving dtype. Measured
# with `malloc.trim_heap` between blocks: 1.14 in float32 from bfloat16 files (Qwen3-0.6B shape,
# torch 2.13, Linux).
LOADING_PEAK_RATIO = 1.25
# The same for quantizing to 8 bits, over the weights in float32: 1.32.
QUANTIZING_PEAK_RATIO = 1.4

_CGROUP = Path("/sys/fs/cgroup")


def check_headroom(
    directory: Path, settings: ServingSettings, *, available: int | None = None
) -> None:
    """Raise StudentRefused (transient) if loading `directory` might exhaust the host's memory.

    `available` defaults to `available_bytes()`.
    """
    weights = serving_bytes(directory, bytes_per_weight=bytes_per_weight(settings))
    needed = int(weights * LOADING_PEAK_RATIO) + settings.memory_reserve_bytes
    if available is None:
        available = available_bytes()
    if needed > available:
        raise StudentRefused(
            f"Loading needs about {needed >> 20} MiB ({LOADING_PEAK_RATIO} times the weights, "
            f"{weights >> 20} MiB, plus a reserve of {settings.memory_reserve_bytes >> 20} MiB); "
            f"{available >> 20} MiB are available.",
            transient=True,
        )


def bytes_to_quantize(directory: Path, settings: ServingSettings) -> int:
    """Return the bytes that must be available to quantize the artifact in `directory`."""
    weights = serving_bytes(directory, bytes_per_weight=4)
    return int(weights * QUANTIZING_PEAK_RATIO) + settings.memory_reserve_bytes


def serving_bytes(directory: Path, *, bytes_per_weight: int) -> int:
    """Return the size of an artifact's weights in their serving dtype; 0 without weights."""
    headers = [read_header(file) for file in directory.glob("*.safetensors")]
    num_weights = sum(
        tensor.num_elements for header in headers for tensor in header.tensors.values()
    )
    return num_weights * bytes_per_weight


def bytes_per_weight(settings: ServingSettings) -> int:
    """Return 2 if students serve in bfloat16 and 4 if in float32.

    With the device `auto` an accelerator is not considered, since detecting one needs torch.
    """
    if settings.dtype is ServingDtype.AUTO:
        return 2 if settings.device.startswith("cuda") or bf16_is_faster() else 4
    return 2 if settings.dtype is ServingDtype.BFLOAT16 else 4


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Return the memory still available to this process: the machine's or its container's, if smaller."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read_bytes(cgroup / "memory.max"), _read_bytes(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    # The kernel reclaims cached files before it kills a process.
    return min(available, max(0, limit - used + _reclaimable_bytes(cgroup / "memory.stat")))


def _reclaimable_bytes(stat: Path) -> int:
    try:
        lines = stat.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit
