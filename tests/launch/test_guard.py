import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from services.shared.launch.processes import GUARD


def _run(
    *options: str, command: list[str], env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-S", str(GUARD), *options, *command],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )


def test_the_guard_becomes_its_command_with_the_commands_own_options() -> None:
    done = _run(command=["sh", "-c", "echo $0 $@; exit 3", "a", "--signal", "-x"])
    assert (done.stdout, done.returncode) == ("a --signal -x\n", 3)


def test_the_parent_death_signal_is_the_chosen_one() -> None:
    ask = (
        "import ctypes; n = ctypes.c_int();"
        " ctypes.CDLL(None).prctl(2, ctypes.byref(n)); print(n.value)"
    )
    assert _run("--signal", "SIGINT", command=[sys.executable, "-c", ask]).stdout == "2\n"


def test_a_command_whose_parent_is_already_dead_does_not_start() -> None:
    done = _run("--parent", "1" if os.getpid() != 1 else "2", command=["echo", "started"])
    assert (done.stdout, done.returncode) == ("", 1)
    assert "the parent died" in done.stderr


def test_a_rank_adopted_by_another_process_does_not_start() -> None:
    marked = os.environ | {"STILLHOUSE_RUN_MARK": "/runs/a/1"}
    adopted = _run(command=["echo", "started"], env=marked)  # our own environment bears no mark
    assert (adopted.stdout, adopted.returncode) == ("", 1)
    guard = [sys.executable, "-I", "-S", str(GUARD), "echo", "started"]
    torchrun = f"import subprocess; subprocess.run({guard!r})"
    child = subprocess.run(
        [sys.executable, "-c", torchrun], env=marked, capture_output=True, text=True, check=True
    )
    assert child.stdout == "started\n"


def test_no_core_is_dumped() -> None:
    assert _run(command=["sh", "-c", "ulimit -S -c"]).stdout == "0\n"


def test_each_rank_is_bound_to_its_own_node_and_prefers_its_memory(tmp_path: Path) -> None:
    numactl = tmp_path / "numactl"
    numactl.write_text('#!/bin/sh\necho "$@"\n')
    numactl.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LOCAL_RANK": "1"}
    env["STILLHOUSE_NUMA_NODES"] = "0,4,"
    done = _run(command=["rank"], env=env)
    assert done.stdout == "--cpunodebind=4 --preferred=4 rank\n"
    free = _run(command=["echo", "free"], env=env | {"LOCAL_RANK": "2"})
    assert free.stdout == "free\n"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_keeps_the_right_to_pass_closed_directories_and_no_other(
    tmp_path: Path,
) -> None:
    user = pwd.getpwnam("nobody")
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed" / "file").write_text("seen")
    file = tmp_path / "closed" / "file"
    script = (
        f"id -u; cat {file}; for act in 'chown 0' 'touch'; do $act {file} || echo refused; done"
    )
    done = _run(
        "--user", "nobody", command=["sh", "-c", f"{script}; echo x > {file} || echo refused"]
    )
    assert done.stdout.split() == [str(user.pw_uid), "seenrefused", "refused", "refused"]
    assert file.read_text() == "seen"
