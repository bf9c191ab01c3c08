from pathlib import Path

import pytest

from services.shared.launch.oom_counter import OomCounters

V1 = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"
V2 = "low 0\nhigh 0\nmax 3\noom 1\noom_kill {}\noom_group_kill 0\n"


def _machine(root: Path, *, cgroup: str, counter: str | None, text: str = "") -> Path:
    (root / "proc/7").mkdir(parents=True)
    (root / "proc/7/cgroup").write_text(cgroup)
    (root / "proc/vmstat").write_text("pgfault 5\noom_kill 10\n")
    path = root / (counter or "nowhere")
    if counter:
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return path


CASES = {
    "v1": ("4:memory:/jobs/a\n0::/\n", "sys/fs/cgroup/memory/jobs/a/memory.oom_control", V1),
    "v1 joined": ("3:cpu,memory:/j\n", "sys/fs/cgroup/memory/j/memory.oom_control", V1),
    "v1 in a container": ("4:memory:/docker/x\n", "sys/fs/cgroup/memory/memory.oom_control", V1),
    "v2": ("0::/jobs/a\n", "sys/fs/cgroup/jobs/a/memory.events", V2),
    "v2 in a container": ("0::/\n", "sys/fs/cgroup/memory.events", V2),
    "v2 next to v1": ("4:cpu:/\n0::/u\n", "sys/fs/cgroup/unified/u/memory.events", V2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kill_in_the_ranks_cgroup_is_seen(name: str, tmp_path: Path) -> None:
    cgroup, counter, text = CASES[name]
    path = _machine(tmp_path, cgroup=cgroup, counter=counter, text=text.format(2))
    counters = OomCounters(root=tmp_path)
    counters.track([7])
    assert counters.killed() is False
    path.write_text(text.format(3))
    assert counters.killed() is True


def test_the_kills_of_other_cgroups_do_not_count(tmp_path: Path) -> None:
    cgroup, counter, text = CASES["v1"]
    _machine(tmp_path, cgroup=cgroup, counter=counter, text=text.format(2))
    counters = OomCounters(root=tmp_path)
    counters.track([7])
    (tmp_path / "proc/vmstat").write_text("oom_kill 11\n")
    assert counters.killed() is False


def test_the_machines_counter_decides_where_no_cgroup_can_be_read(tmp_path: Path) -> None:
    _machine(tmp_path, cgroup="", counter=None)
    counters = OomCounters(root=tmp_path)
    counters.track([7, 8])
    assert counters.killed() is False
    (tmp_path / "proc/vmstat").write_text("oom_kill 11\n")
    assert counters.killed() is True


def test_a_kernel_that_counts_nothing_gives_no_answer(tmp_path: Path) -> None:
    counters = OomCounters(root=tmp_path)
    counters.track([7])
    assert counters.killed() is None
