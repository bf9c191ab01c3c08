"""Whether memory holds another student beside those that serve. Torch-free."""

from __future__ import annotations

from pathlib import Path

import psutil

from services.api.serving.promoted import StudentRefused

# Weights are laid out layer by layer: a swap of a 477 MiB bf16 student raised resident memory by 0.93
# of its size at the peak. Served in float32 from bf16 files it is twice that: the reserve covers it.
PEAK_OVER_ARTIFACT = 1.5

_CGROUP = Path("/sys/fs/cgroup")


def check_memory(directory: Path, *, reserve_bytes: int) -> None:
    """Raise StudentRefused (transient) where loading `directory` might exhaust the host's memory."""
    weights = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    needed = int(weights * PEAK_OVER_ARTIFACT) + reserve_bytes
    available = available_bytes()
    if needed > available:
        raise StudentRefused(
            f"Loading needs about {needed >> 20} MiB (the weights, {weights >> 20} MiB, "
            f"{PEAK_OVER_ARTIFACT} times, and {reserve_bytes >> 20} MiB in reserve); "
            f"{available >> 20} MiB are available.",
            transient=True,
        )


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Return what a process may still take: of the machine or of its container, the smaller."""
    available = int(psutil.virtual_memory().available)
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    return min(available, max(0, limit - used))


def _read(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max" means no limit
