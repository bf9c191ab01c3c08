"""The kernel's counters of out-of-memory kills: the only trace that such a SIGKILL leaves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path


class OomCounters:
    """The kernel's OOM kill counters of the memory cgroups, version 1 or 2, that processes are in.

    Track the ranks while they run: their cgroup may differ from the worker's.
    """

    def __init__(self, *, root: Path = Path("/")) -> None:
        self._root = root
        self._first: dict[Path, int] = {}
        self._machine = root / "proc/vmstat"
        self._machine_first = _kills(self._machine)

    def track(self, pids: Iterable[int | str]) -> None:
        """Record the counters of the cgroups of these processes, where not yet recorded."""
        for pid in pids:
            for path in self._files(pid):
                if path not in self._first and (count := _kills(path)) is not None:
                    self._first[path] = count

    def killed(self) -> bool | None:
        """Return whether the kernel has killed since tracking began; None where nothing counts.

        The machine's counter (/proc/vmstat) counts the processes of others, too, so it decides only
        where no cgroup can be read.
        """
        if self._first:
            return any((_kills(path) or 0) > first for path, first in self._first.items())
        now = _kills(self._machine)
        if now is None or self._machine_first is None:
            return None
        return now > self._machine_first

    def _files(self, pid: int | str) -> list[Path]:
        try:
            lines = (self._root / "proc" / str(pid) / "cgroup").read_text().splitlines()
        except OSError:
            return []
        mount = self._root / "sys/fs/cgroup"
        files = []
        for line in lines:
            _, controllers, path = line.split(":", 2)
            below = path.lstrip("/")
            if controllers == "":
                files += [mount / below / "memory.events"]
                files += [mount / "unified" / below / "memory.events"]
            elif "memory" in controllers.split(","):
                files.append(mount / "memory" / below / "memory.oom_control")
                # In a container the path counts from the host's root, the mount shows only ours.
                files.append(mount / "memory" / "memory.oom_control")
        return [*files, mount / "memory.events"]


def _kills(path: Path) -> int | None:
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(found.group(1)) if found else None
