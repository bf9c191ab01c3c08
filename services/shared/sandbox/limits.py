"""The limits of one call, all of them kept by the kernel, whatever the code of a library does."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_OOM_SCORE = Path("/proc/self/oom_score_adj")
_MAX_FILES = 1024


@dataclass(frozen=True)
class Limits:
    """What a call may use."""

    seconds: float  # of CPU time
    wall_seconds: (
        float  # longer, so that only a call that waits, or a machine without time for it, needs it
    )
    memory_bytes: int  # of address space, with everything that is loaded
    file_bytes: int = 0  # of each file that it writes


def apply_limits(limits: Limits) -> None:
    """Limit the calling process for the rest of its life."""
    # The default action of SIGALRM and SIGXCPU ends the process, also within a library's loop.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, limits.wall_seconds)
    _set_limit(resource.RLIMIT_CPU, max(1, round(limits.seconds)), margin=1)
    _set_limit(resource.RLIMIT_AS, limits.memory_bytes)
    _set_limit(resource.RLIMIT_FSIZE, limits.file_bytes)
    _set_limit(resource.RLIMIT_NOFILE, _MAX_FILES)
    _set_limit(resource.RLIMIT_CORE, 0)
    if _OOM_SCORE.exists():
        # If the host runs out of memory all the same, the kernel ends this process first.
        _OOM_SCORE.write_text("1000")


def end_with_parent(parent: int) -> None:
    """Let the kernel end the calling process when its parent, whose id is `parent`, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _set_limit(kind: int, value: int, *, margin: int = 0) -> None:
    """Set a limit; of CPU time, the hard limit ends a process without saying that it was the time."""
    hard = resource.getrlimit(kind)[1]  # only root may raise it
    if hard == resource.RLIM_INFINITY:
        hard = value + margin
    resource.setrlimit(kind, (min(value, hard), min(value + margin, hard)))
