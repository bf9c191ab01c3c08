"""compose.yaml and its overlays as docker compose merges them; no engine is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.shared.jobs.settings import JobSettings

ROOT = Path(__file__).resolve().parents[2]

BASE = {
    "POSTGRES_PASSWORD": "for-postgres",
    "REDIS_PASSWORD": "for-redis",
    "MODELS_DIR": "/srv/models",
    "API_KEYS_FILE": "/srv/api_keys.json",
}
OVERLAYS = {
    "dcu": {
        "DCU_IMAGE": "vendor/pytorch@sha256:0",
        "DCU_DEVICES": "0,1",
        "HYHAL_PATH": "/opt/hyhal",
        "VIDEO_GID": "39",
        "RENDER_GID": "105",
        "WORKER_MEMORY": "400GiB",
    },
    "rocm": {
        "ROCM_IMAGE": "vendor/pytorch",
        "ROCM_DEVICES": "0,1",
        "VIDEO_GID": "44",
        "RENDER_GID": "109",
        "WORKER_MEMORY": "400GiB",
    },
    "cuda": {"CUDA_DEVICES": "0,1", "WORKER_MEMORY": "400GiB"},
    "cluster": {"CLUSTER_ADDRESS": "10.0.0.1", "SHARED_DATA_DIR": "/mnt/stillhouse"},
}
ACCELERATORS = ["dcu", "rocm", "cuda"]
WORKERS = ["trainer", "distiller"]


def _has_compose() -> bool:
    if shutil.which("docker") is None:
        return False
    version = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    return version.returncode == 0


pytestmark = pytest.mark.skipif(not _has_compose(), reason="docker compose is not installed")


def compose_config(
    directory: Path, *overlays: str, env: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Run `docker compose config` on the files with these variables and no others."""
    empty = directory / "no.env"
    empty.touch()
    command = ["docker", "compose", "--env-file", str(empty)]
    for name in ["compose.yaml", *(f"compose.{overlay}.yaml" for overlay in overlays)]:
        command += ["--file", str(ROOT / name)]
    env = {"PATH": os.environ["PATH"], "HOME": str(directory)} | env
    command += ["config", "--format", "json"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def merged(directory: Path, *overlays: str, **more: str) -> dict[str, Any]:
    env = dict(BASE)
    for overlay in overlays:
        env |= OVERLAYS[overlay]
    done = compose_config(directory, *overlays, env=env | more)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("missing", BASE)
def test_a_missing_variable_is_refused_and_named(tmp_path: Path, missing: str) -> None:
    env = {name: value for name, value in BASE.items() if name != missing}
    done = compose_config(tmp_path, env=env)
    assert done.returncode != 0
    assert missing in done.stderr


@pytest.mark.parametrize(
    ("overlay", "missing"),
    [(overlay, name) for overlay, names in OVERLAYS.items() for name in names],
)
def test_a_missing_variable_of_an_overlay_is_refused_and_named(
    tmp_path: Path, overlay: str, missing: str
) -> None:
    env = {name: value for name, value in OVERLAYS[overlay].items() if name != missing}
    done = compose_config(tmp_path, overlay, env=BASE | env)
    assert done.returncode != 0
    assert missing in done.stderr


@pytest.mark.parametrize("overlays", [[], *[[name] for name in ACCELERATORS]])
def test_only_the_api_publishes_a_port_and_only_on_loopback(
    tmp_path: Path, overlays: list[str]
) -> None:
    services = merged(tmp_path, *overlays)["services"]
    open_ports = {
        name: [port["host_ip"] for port in service["ports"]]
        for name, service in services.items()
        if "ports" in service
    }
    assert open_ports == {"api": ["127.0.0.1"]}


@pytest.mark.parametrize("overlays", [[], *[[name] for name in OVERLAYS]])
def test_nothing_is_privileged_or_shares_a_namespace_of_the_host(
    tmp_path: Path, overlays: list[str]
) -> None:
    for service in merged(tmp_path, *overlays)["services"].values():
        assert not {"privileged", "network_mode", "pid", "ipc", "userns_mode"} & set(service)
        assert "no-new-privileges:true" in service["security_opt"]


@pytest.mark.parametrize("overlays", [[], *[[name] for name in ACCELERATORS]])
def test_our_services_have_only_the_capabilities_that_an_overlay_adds(
    tmp_path: Path, overlays: list[str]
) -> None:
    services = merged(tmp_path, *overlays)["services"]
    for name in ("api", "migrate", *WORKERS):
        assert services[name]["cap_drop"] == ["ALL"]
    held = {name for name in services if services[name].get("cap_add")}
    assert held == (set(WORKERS) if overlays else set())


def test_services_wait_until_their_dependencies_are_healthy(tmp_path: Path) -> None:
    services = merged(tmp_path)["services"]
    wanted = {
        "postgres": "service_healthy",
        "redis": "service_healthy",
        "migrate": "service_completed_successfully",
    }
    for name in ("api", *WORKERS):
        needs = services[name]["depends_on"]
        assert {need: needs[need]["condition"] for need in needs} == wanted


def test_every_service_has_a_memory_limit_and_rotates_its_log(tmp_path: Path) -> None:
    for service in merged(tmp_path)["services"].values():
        assert int(service["mem_limit"]) > 0
        assert service["logging"]["options"].keys() == {"max-size", "max-file"}


def test_a_worker_may_take_longer_to_stop_than_its_ranks_to_save(tmp_path: Path) -> None:
    service = merged(tmp_path)["services"]["trainer"]
    saving = float(service["environment"]["STILLHOUSE_STOP_GRACE_SECONDS"])
    assert saving == JobSettings.model_fields["stop_grace_seconds"].default
    assert service["stop_grace_period"] == "3m0s"
    assert saving + 35 < 180  # 35 s: from SIGTERM to torchrun until the last rank is killed


def test_the_api_gets_the_memory_limit_of_the_workers(tmp_path: Path) -> None:
    services = merged(tmp_path, WORKER_MEMORY="48GiB")["services"]
    assert services["api"]["environment"]["STILLHOUSE_HOST_MEMORY"] == "48GiB"
    assert {services[name]["mem_limit"] for name in WORKERS} == {str(48 * 2**30)}


def test_threads_are_passed_on_only_where_they_are_set(tmp_path: Path) -> None:
    plain = merged(tmp_path)["services"]["trainer"]["environment"]
    chosen = merged(tmp_path, OMP_NUM_THREADS="1")["services"]["trainer"]["environment"]
    assert plain.get("OMP_NUM_THREADS") is None
    assert chosen["OMP_NUM_THREADS"] == "1"


def test_only_services_that_need_a_password_get_it(tmp_path: Path) -> None:
    services = merged(tmp_path)["services"]
    holders = {
        name
        for name, service in services.items()
        if "for-redis" in json.dumps([service.get("environment"), service.get("command")])
    }
    assert holders == {"redis", "api", *WORKERS}


def test_no_password_is_in_a_command(tmp_path: Path) -> None:
    services = merged(tmp_path)["services"].values()
    commands = json.dumps([[each.get("command"), each.get("healthcheck")] for each in services])
    assert "for-redis" not in commands
    assert "for-postgres" not in commands


def test_the_api_keys_come_as_a_secret(tmp_path: Path) -> None:
    found = merged(tmp_path)
    assert found["secrets"]["api_keys"]["file"] == BASE["API_KEYS_FILE"]
    assert [secret["source"] for secret in found["services"]["api"]["secrets"]] == ["api_keys"]


def test_a_missing_directory_of_models_fails_at_start(tmp_path: Path) -> None:
    for name in ("api", *WORKERS):
        volumes = merged(tmp_path)["services"][name]["volumes"]
        models = next(volume for volume in volumes if volume["target"] == "/models")
        assert models["read_only"] is True
        assert not models["bind"].get("create_host_path")


@pytest.mark.parametrize("worker", WORKERS)
def test_a_missing_dcu_driver_fails_at_start(tmp_path: Path, worker: str) -> None:
    volumes = merged(tmp_path, "dcu")["services"][worker]["volumes"]
    assert [volume["target"] for volume in volumes] == ["/data", "/models", "/opt/hyhal"]
    hyhal = volumes[2]
    assert hyhal["read_only"] is True
    assert not hyhal["bind"].get("create_host_path")


@pytest.mark.parametrize("worker", WORKERS)
@pytest.mark.parametrize("overlay", ["dcu", "rocm"])
def test_groups_are_ids_of_the_host(tmp_path: Path, overlay: str, worker: str) -> None:
    names = OVERLAYS[overlay]
    service = merged(tmp_path, overlay)["services"][worker]
    assert service["group_add"] == [names["VIDEO_GID"], names["RENDER_GID"]]


@pytest.mark.parametrize("worker", WORKERS)
def test_a_dcu_worker_gets_its_devices_and_runtime_settings(tmp_path: Path, worker: str) -> None:
    service = merged(tmp_path, "dcu")["services"][worker]
    devices = [device["source"] for device in service["devices"]]
    assert devices == ["/dev/kfd", "/dev/dri", "/dev/mkfd"]
    assert "seccomp=unconfined" in service["security_opt"]
    assert service["cap_add"] == ["SYS_NICE", "SYS_PTRACE"]
    assert service["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    assert int(service["shm_size"]) == 64 * 2**30
    assert service["environment"]["HIP_VISIBLE_DEVICES"] == "0,1"
    # Together with HIP_VISIBLE_DEVICES each of these hides every card or aborts the start.
    assert not {"ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"} & service["environment"].keys()


def test_a_host_without_mkfd_names_another_device(tmp_path: Path) -> None:
    service = merged(tmp_path, "dcu", DCU_MKFD="/dev/null")["services"]["trainer"]
    assert [device["source"] for device in service["devices"]][2] == "/dev/null"


def test_rocm_takes_neither_the_driver_nor_the_device_of_hygon(tmp_path: Path) -> None:
    service = merged(tmp_path, "rocm")["services"]["trainer"]
    assert [device["source"] for device in service["devices"]] == ["/dev/kfd", "/dev/dri"]
    assert "/opt/hyhal" not in [volume["target"] for volume in service["volumes"]]


def test_cuda_reserves_the_devices_that_are_named(tmp_path: Path) -> None:
    service = merged(tmp_path, "cuda")["services"]["trainer"]
    (device,) = service["deploy"]["resources"]["reservations"]["devices"]
    assert device["driver"] == "nvidia"
    assert device["device_ids"] == ["0,1"] or device["device_ids"] == ["0", "1"]
    assert "gpu" in device["capabilities"]


@pytest.mark.parametrize("overlay", ACCELERATORS)
def test_the_api_stays_on_the_slim_image(tmp_path: Path, overlay: str) -> None:
    plain, over = merged(tmp_path)["services"]["api"], merged(tmp_path, overlay)["services"]["api"]
    assert (over["image"], over["build"]) == (plain["image"], plain["build"])
    assert "devices" not in over
    assert over["environment"]["STILLHOUSE_ENGINE"] in ("fsdp1", "fsdp2")


@pytest.mark.parametrize(
    ("overlay", "backend"), [("dcu", "hip"), ("rocm", "hip"), ("cuda", "cuda")]
)
def test_a_worker_is_built_for_its_accelerator(tmp_path: Path, overlay: str, backend: str) -> None:
    for worker in WORKERS:
        build = merged(tmp_path, overlay)["services"][worker]["build"]
        assert build["target"] == worker
        assert build["args"]["TORCH_BACKEND"] == backend


def test_the_nodes_of_a_cluster_connect_to_the_address_of_the_first(tmp_path: Path) -> None:
    found = merged(tmp_path, "dcu", "cluster")
    for name in ("api", *WORKERS):
        environment = found["services"][name]["environment"]
        assert "@10.0.0.1:5432/" in environment["STILLHOUSE_DATABASE_URL"]
        assert "@10.0.0.1:6379/" in environment["STILLHOUSE_BROKER_URL"]
    for name in ("postgres", "redis"):
        assert [port["host_ip"] for port in found["services"][name]["ports"]] == ["10.0.0.1"]
    assert found["volumes"]["data"]["driver_opts"]["device"] == "/mnt/stillhouse"
