"""Run all rank checks once on two gloo ranks; every test reads the result of its check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from services.shared.memory.recipe import Engine
from services.shared.training.sharding.shard import default_engine
from tests.training.rank_checks import Measured

REPOSITORY = Path(__file__).parents[2]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what asks for FSDP2 where torch (2.5) has none."""
    if default_engine() is Engine.FSDP1:
        for item in items:
            if "fsdp2" in item.name:
                item.add_marker(pytest.mark.skip(reason="torch has no public FSDP2 before 2.6"))


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """Return the result of a check by name; a check that failed on the ranks fails the test."""
    directory = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", "tests.training.rank_runner"]
    run = subprocess.run(
        [*command, str(directory)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )

    def result(name: str) -> Any:
        path = directory / f"{name}.json"
        if not path.exists():
            pytest.fail(f"the ranks ended before {name}:\n{run.stderr[-4000:]}")
        record = json.loads(path.read_text())
        if "error" in record:
            pytest.fail(record["error"])
        return record["result"]

    return result
