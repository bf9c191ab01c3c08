"""The shell scripts that start services and check their health."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

DOCKER = Path(__file__).resolve().parents[2] / "docker"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


def run(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(DOCKER / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"]} | env,
    )


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
)
def test_an_empty_list_of_devices_is_unset(name: str) -> None:
    assert name not in run("entrypoint", "env", **{name: ""}).stdout
    assert f"{name}=1" in run("entrypoint", "env", **{name: "1"}).stdout


def test_a_command_keeps_its_arguments_and_its_exit_code() -> None:
    done = run("entrypoint", "bash", "-c", 'echo "$1"; exit 7', "-", "two words")
    assert (done.stdout, done.returncode) == ("two words\n", 7)


def test_no_command_is_refused() -> None:
    done = run("entrypoint")
    assert done.returncode == 2
    assert "name a service" in done.stderr


def test_a_worker_with_a_recent_sweep_is_healthy(tmp_path: Path) -> None:
    (tmp_path / "alive").touch()
    assert run("health", "worker", STILLHOUSE_ALIVE_FILE=str(tmp_path / "alive")).returncode == 0


def test_a_worker_whose_sweeps_fail_is_unhealthy(tmp_path: Path) -> None:
    alive = tmp_path / "alive"
    alive.touch()
    os.utime(alive, (time.time() - 500, time.time() - 500))
    done = run("health", "worker", STILLHOUSE_ALIVE_FILE=str(alive))
    assert done.returncode == 1
    assert "no sweep has succeeded" in done.stdout


def test_a_worker_that_never_swept_is_unhealthy(tmp_path: Path) -> None:
    assert run("health", "worker", STILLHOUSE_ALIVE_FILE=str(tmp_path / "alive")).returncode != 0


@pytest.mark.parametrize("script", ["entrypoint", "health", "install-service", "system-packages"])
def test_scripts_are_executable_and_parse(script: str) -> None:
    assert os.access(DOCKER / script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(DOCKER / script)], check=False).returncode == 0
