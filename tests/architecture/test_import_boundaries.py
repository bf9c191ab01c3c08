"""Import boundaries: the layer contracts, and what each process never loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What a process of each kind must not load, directly or through others.
TORCH = {"torch", "transformers", "accelerate", "safetensors"}
DATABASE = {"sqlalchemy", "psycopg", "alembic", "celery", "kombu", "redis"}
# Maximum memory of a process in MiB once its code is imported: 1.5 times what was measured (Python
# 3.11, x86-64). torch alone adds 250.
SUPERVISORS = {
    "services.api.app": 180,  # 121 measured, including pyarrow
    "services.trainer.worker": 110,  # 73
    "services.distiller.worker": 110,
    "services.shared.jobs.db.store": 90,  # 57
    "services.shared.jobs.sweep": 90,
    "services.shared.launch.doctor.doctor": 40,  # 18
    "services.cli.main": 60,  # 36
}
RANKS = [
    "services.trainer.main",
    "services.distiller.main",
    "services.shared.training.selfcheck.checks",
]
# VmHWM, because ru_maxrss is inherited from the parent process.
_PROBE = (
    "import importlib, json, re, sys; importlib.import_module(sys.argv[1]);"
    " peak = re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read()).group(1);"
    " print(json.dumps([sorted({name.partition('.')[0] for name in sys.modules}),"
    " int(peak) // 1024]))"
)


def _loaded(module: str) -> tuple[set[str], int]:
    """Return the top-level packages that importing `module` loads, and the process's peak in MiB."""
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, module],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    names, peak_mib = json.loads(done.stdout)
    return set(names), peak_mib


def test_import_contracts_hold() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("module", SUPERVISORS)
def test_supervisors_load_no_torch_and_stay_small(module: str) -> None:
    names, peak_mib = _loaded(module)
    assert names & TORCH == set()
    assert peak_mib < SUPERVISORS[module]


@pytest.mark.parametrize("module", RANKS)
def test_ranks_load_neither_database_nor_broker(module: str) -> None:
    assert _loaded(module)[0] & DATABASE == set()


def test_the_command_line_loads_no_server_packages() -> None:
    names, _ = _loaded("services.cli.main")
    assert names & (DATABASE | {"fastapi", "uvicorn", "pyarrow", "numpy"}) == set()


def test_memory_needs_only_the_standard_library() -> None:
    """Without site-packages (-S) and without anything from the environment (-I)."""
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "services/shared/memory").rglob("[a-z]*.py"))
    ]
    code = (
        f"import importlib, sys; sys.path.insert(0, {str(ROOT)!r});"
        f" [importlib.import_module(m) for m in {modules!r}]"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert len(modules) > 10
    assert done.returncode == 0, done.stderr


def test_no_module_has_a_catch_all_name() -> None:
    forbidden = {"utils", "helpers", "common", "misc", "base", "manager", "managers", "util"}
    found = [p for p in (ROOT / "services").rglob("*.py") if p.stem in forbidden]
    assert found == []


def test_init_files_hold_only_a_docstring() -> None:
    for path in (ROOT / "services").rglob("__init__.py"):
        code = [line for line in path.read_text().splitlines() if line.strip()]
        assert len(code) == 1, path
        assert code[0].startswith('"""'), path
