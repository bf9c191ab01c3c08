"""Runs a command that must not outlive its parent; standard library alone, run as a script.

    python -I -S guard.py [--signal SIGKILL] [--parent PID] [--user NAME] COMMAND...

The guard asks the kernel for a signal at its parent's death (PR_SET_PDEATHSIG survives exec, not
fork), then replaces itself by the command. A script, because the same done in `preexec_fn` runs
Python in a forked child of a process with threads. Ranks get no options, since torchrun would parse
them as its own; their NUMA nodes come in STILLHOUSE_NUMA_NODES, by local rank.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import pwd
import resource
import signal
import sys

# linux/prctl.h and linux/capability.h; stable kernel interface.
_PR_SET_PDEATHSIG = 1
_PR_SET_KEEPCAPS = 8
_PR_CAP_AMBIENT = 47
_PR_CAP_AMBIENT_RAISE = 2
_CAP_DAC_READ_SEARCH = 2
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Parse the options, set the parent-death signal, and exec the command."""
    parser = argparse.ArgumentParser(prog="guard")
    parser.add_argument("--signal", default="SIGKILL", choices=[s.name for s in signal.Signals])
    parser.add_argument("--parent", type=int, default=0)
    parser.add_argument("--user")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if options.user:
        _switch_user(pwd.getpwnam(options.user))
    # After the change of user, which clears it.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.Signals[options.signal].value, 0, 0, 0)
    if _is_orphan(options.parent):
        sys.exit("guard: the parent died before its command started")
    # A core dump of a rank is gigabytes in the working directory, once per crash.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Ranks open a file per shard; and what the worker may still open says nothing about them.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    command = _with_numa_binding(options.command)
    os.execvp(command[0], command)


def _is_orphan(parent: int) -> bool:
    """Return whether the parent died before its death signal was set.

    A rank does not know torchrun's pid, but torchrun has the same mark in its environment as the
    rank; a process that adopts an orphan does not. Returns False where the parent cannot be read.
    """
    if parent:
        return os.getppid() != parent
    mark = os.environ.get("STILLHOUSE_RUN_MARK")
    if mark is None:
        return False
    try:
        with open(f"/proc/{os.getppid()}/environ", "rb") as file:  # noqa: PTH123
            variables = file.read().split(b"\0")
    except OSError:
        return False
    return f"STILLHOUSE_RUN_MARK={mark}".encode() not in variables


def _with_numa_binding(command: list[str]) -> list[str]:
    """Return a rank's command under numactl; `preferred`, since a strict bind can exhaust a node."""
    nodes = os.environ.get("STILLHOUSE_NUMA_NODES", "").split(",")
    local_rank = os.environ.get("LOCAL_RANK", "")
    node = nodes[int(local_rank)] if local_rank and int(local_rank) < len(nodes) else ""
    if not node:
        return command
    return ["numactl", f"--cpunodebind={node}", f"--preferred={node}", *command]


def _switch_user(user: pwd.struct_passwd) -> None:
    """Change to `user`, keeping only the right to traverse directories that are closed to others.

    Postgres refuses to run as root, yet its programs and its data may be below /root. Keeping
    CAP_DAC_READ_SEARCH as an ambient capability lets this one process pass closed directories, and
    write nowhere but in its own, where a chmod would open them to every user. Where the capability
    is not held, only open paths work.
    """
    _libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)
    bit = 1 << _CAP_DAC_READ_SEARCH
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    sets = (ctypes.c_uint32 * 6)(bit, bit, bit, 0, 0, 0)  # effective, permitted, inheritable
    if _libc.capset(header, sets) == 0:
        _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_READ_SEARCH, 0, 0)


if __name__ == "__main__":
    main()
