"""Host memory of a plan, and the limits of containers."""

from pathlib import Path

import pytest

from services.shared.memory.architecture.shape import from_preset
from services.shared.memory.cgroup import container_limit_bytes, host_memory_bytes
from services.shared.memory.hardware import machine
from services.shared.memory.planning.host_memory import DATA_BYTES_PER_TEXT
from services.shared.memory.planning.plan import plan
from services.shared.memory.planning.plan_contract import Verdict
from services.shared.memory.recipe import Recipe
from services.shared.memory.sizes import GIB

_SHAPE = from_preset("qwen3-8b")
_WHOLE = 2 * _SHAPE.num_parameters


def _loading(how: str) -> int:
    recipe = Recipe().with_changes({"loading": how})
    return plan(_SHAPE, recipe, machine("a100-80", ranks=4)).host.loading


def test_loading_holds_the_checkpoint_once_or_on_every_rank() -> None:
    assert _loading("rank0") == _WHOLE
    assert _loading("every_rank") == 4 * _WHOLE


def test_loading_in_slices_holds_no_checkpoint() -> None:
    assert _loading("sliced") < GIB


def test_each_rank_holds_an_index_of_the_training_texts() -> None:
    few, many = (
        plan(_SHAPE, Recipe(training_texts=texts), machine("a100-80", ranks=4)).host
        for texts in (1_000, 1_000_000)
    )
    assert many.data == 4 * 1_000_000 * DATA_BYTES_PER_TEXT
    assert many.peak_bytes - few.peak_bytes == many.data - few.data
    assert many.to_dict()["data"] == many.data


@pytest.mark.parametrize(
    ("memory", "verdict"),
    [(None, Verdict.UNKNOWN), (64 * GIB, Verdict.FITS), (2 * GIB, Verdict.DOES_NOT_FIT)],
)
def test_the_host_s_verdict_needs_the_host_s_memory(memory: int | None, verdict: Verdict) -> None:
    planned = plan(_SHAPE, Recipe(), machine("a100-80", ranks=4, host_memory_bytes=memory))
    assert planned.host_verdict is verdict


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_version_2_container_counts_its_tightest_group(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal:       67108864 kB\n",
            "proc/self/cgroup": "0::/jobs/one\n",
            "sys/fs/cgroup/jobs/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/jobs/one/memory.max": "max\n",
        },
    )
    assert container_limit_bytes(root) == 8 * GIB
    assert host_memory_bytes(root) == 8 * GIB


def test_a_version_2_group_may_be_mounted_as_the_tree_s_root(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/memory.max": f"{4 * GIB}\n"},
    )
    assert container_limit_bytes(root) == 4 * GIB


def test_a_version_1_container_counts_its_memory_controller(tmp_path: Path) -> None:
    root = _write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n",
            "sys/fs/cgroup/memory/x/memory.limit_in_bytes": f"{3 * GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    assert container_limit_bytes(root) == 3 * GIB


def test_without_a_container_the_host_s_own_memory_counts(tmp_path: Path) -> None:
    root = _write(tmp_path, {"proc/meminfo": "MemTotal: 1024 kB\n", "proc/self/cgroup": "0::/\n"})
    assert container_limit_bytes(root) is None
    assert host_memory_bytes(root) == 1024 * 1024


def test_a_machine_without_proc_files_has_no_known_memory(tmp_path: Path) -> None:
    assert host_memory_bytes(tmp_path) is None
