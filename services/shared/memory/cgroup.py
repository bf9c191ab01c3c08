"""The memory available to this process: the host's, or less where a container limits it."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path("/")
# A v1 group without a limit has 2^63, rounded down to a page.
_UNLIMITED_BYTES = 2**60


def host_memory_bytes(root: Path = _ROOT) -> int | None:
    """Return the smaller of physical memory and every cgroup limit above this process.

    Reads /proc/meminfo, /proc/self/cgroup and /sys/fs/cgroup (version 1 or 2) under `root`; returns
    None where none of them is readable.
    """
    found = [size for size in (_physical_bytes(root), container_limit_bytes(root)) if size]
    return min(found, default=None)


def container_limit_bytes(root: Path = _ROOT) -> int | None:
    """Return the tightest cgroup memory limit of this process, or None without one."""
    tree = root / "sys/fs/cgroup"
    limits = []
    for controllers, path in _memberships(root):
        if controllers == "":
            limits += _limits(tree, path, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(tree / "memory", path, "memory.limit_in_bytes")
    return min(limits, default=None)


def _memberships(root: Path) -> list[tuple[str, str]]:
    """Return (controllers, path) of each hierarchy; version 2 has no controllers in its line."""
    text = _read(root / "proc/self/cgroup")
    lines = [line.split(":", 2) for line in text.splitlines()]
    return [(line[1], line[2]) for line in lines if len(line) == 3]


def _limits(tree: Path, path: str, name: str) -> list[int]:
    """Return the limits of a group and of all groups above it.

    In a container the path may be that on the host, which is not mounted: the root of the tree is
    then the group.
    """
    folder = tree / path.lstrip("/")
    limits = []
    for candidate in (folder, *folder.parents):
        if candidate != tree and tree not in candidate.parents:
            break
        text = _read(candidate / name).strip()
        if text.isdigit() and int(text) < _UNLIMITED_BYTES:
            limits.append(int(text))
    return limits


def _physical_bytes(root: Path) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
