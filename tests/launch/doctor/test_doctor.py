"""The doctor on simulated machines: their files, environment and tool output are made up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.shared.launch.devices import DeviceKind
from services.shared.launch.doctor.device_checks import check_devices, parse_used_memory
from services.shared.launch.doctor.doctor import examine, to_json
from services.shared.launch.doctor.host_checks import check_host
from services.shared.launch.doctor.machine import Finding, Machine, Status
from services.shared.launch.doctor.package_checks import check_packages

DAS = {
    "torch": "2.5.1+das.opt1.dtk2604",
    "transformers": "5.12.1",
    "accelerate": "1.14.0",
    "numpy": "1.25.0",
    "flash-attn": "2.8.3+das.opt1.dtk2604.torch251",
}


def _machine(
    root: Path,
    kind: DeviceKind = DeviceKind.DCU,
    *,
    env: dict[str, str] | None = None,
    packages: dict[str, str] | None = None,
    tools: dict[str, str] | None = None,
) -> Machine:
    answers = tools or {}
    return Machine(
        kind=kind,
        root=root,
        env=env or {},
        packages=DAS if packages is None else packages,
        run_tool=lambda command: answers.get(command[0], ""),
    )


def _found(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


@pytest.fixture
def dcu(tmp_path: Path) -> Path:
    """The files of a healthy DCU container."""
    for directory in ("dev/kfd", "dev/dri", "dev/shm", "opt/hyhal", "opt/dtk", "proc"):
        (tmp_path / directory).mkdir(parents=True)
    (tmp_path / "opt/dtk/.dtk_version").write_text("DTK-26.04\n")
    return tmp_path


HEALTHY = {"LD_LIBRARY_PATH": "/opt/dtk/lib:/opt/hyhal/lib", "MIOPEN_USER_DB_PATH": "/cache"}
DRIVER = {"hy-smi": "HCU: Driver Version: 6.3.32-V1.6.0\n"}


def test_a_healthy_dcu_container_has_no_failed_check(dcu: Path) -> None:
    machine = _machine(dcu, env=HEALTHY, tools=DRIVER)
    findings = [*check_packages(machine), *check_devices(machine)]
    assert [f for f in findings if f.status is Status.FAILED] == []


PACKAGE_FAULTS = [
    ("torch build", {"torch": "2.5.1"}, Status.FAILED),
    ("torch build", {"torch": "2.5.1+cu124"}, Status.FAILED),
    ("sharding engine", {"torch": "2.4.1+das.opt2.dtk2504"}, Status.FAILED),
    ("transformers and accelerate", {"accelerate": "0.34.0"}, Status.FAILED),
    ("numpy", {"numpy": "2.4.6"}, Status.FAILED),
    ("companion wheels", {"triton": "3.3.0+das.opt1.dtk2604.torch290"}, Status.FAILED),
    ("companion wheels", {"flash-attn": ""}, Status.OK),
    ("pickle gate", {}, Status.WARNING),
    ("bitsandbytes", {"bitsandbytes": "0.48.1"}, Status.WARNING),
    ("bitsandbytes", {}, Status.OK),
    ("deepspeed", {"deepspeed": "0.18.2"}, Status.WARNING),
    ("deepspeed", {}, Status.NOT_APPLICABLE),
]


@pytest.mark.parametrize(("name", "changes", "status"), PACKAGE_FAULTS)
def test_a_fault_of_packages_is_found(
    name: str, changes: dict[str, str], status: Status, dcu: Path
) -> None:
    finding = _found(check_packages(_machine(dcu, packages=DAS | changes)), name)
    assert finding.status is status
    assert finding.remedy or status in (Status.OK, Status.NOT_APPLICABLE)


def test_a_dcu_without_flash_attention_is_warned_of_the_quadratic_path(dcu: Path) -> None:
    packages = {name: version for name, version in DAS.items() if name != "flash-attn"}
    finding = _found(check_packages(_machine(dcu, packages=packages)), "companion wheels")
    assert finding.status is Status.WARNING
    assert "O(S^2)" in finding.detail


ENVIRONMENT_FAULTS = [
    ("device selection", {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}, Status.FAILED),
    ("device selection", {"CUDA_VISIBLE_DEVICES": ""}, Status.FAILED),
    ("device selection", {"HIP_VISIBLE_DEVICES": "1,2"}, Status.OK),
    ("fine-grained PCIe", {"HSA_FORCE_FINE_GRAIN_PCIE": "0"}, Status.WARNING),
    ("allocator settings", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, Status.WARNING),
    (
        "allocator settings",
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_HIP_ALLOC_CONF": "x:1"},
        Status.WARNING,
    ),
    ("debug variables", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, Status.WARNING),
    ("debug variables", {"GLOG_minloglevel": "3"}, Status.WARNING),
    ("collective tuning", {"NCCL_MIN_NCHANNELS": "32"}, Status.WARNING),
    ("DTK environment", {"LD_LIBRARY_PATH": ""}, Status.FAILED),
]


@pytest.mark.parametrize(("name", "env", "status"), ENVIRONMENT_FAULTS)
def test_a_fault_of_the_environment_is_found(
    name: str, env: dict[str, str], status: Status, dcu: Path
) -> None:
    finding = _found(check_devices(_machine(dcu, env=HEALTHY | env, tools=DRIVER)), name)
    assert finding.status is status


@pytest.mark.parametrize(
    ("dtk", "driver", "status"),
    [
        ("26.04", "6.3.30-V1.4.1a", Status.OK),
        ("26.04", "6.3.16-V1.1.0a", Status.FAILED),
        ("25.04.2", "6.3.16", Status.OK),
        ("25.04.2", "6.3.8", Status.FAILED),
        ("25.04.1", "6.3.6", Status.OK),
        ("24.04.3", "5.7.1", Status.OK),
        ("24.04.3", "5.6.0", Status.FAILED),
    ],
)
def test_a_driver_older_than_dtk_needs_is_found(
    dtk: str, driver: str, status: Status, dcu: Path
) -> None:
    (dcu / "opt/dtk/.dtk_version").write_text(dtk)
    tools = {"hy-smi": f"Driver Version: {driver}"}
    assert _found(check_devices(_machine(dcu, tools=tools)), "driver").status is status


def test_dtks_version_is_read_from_its_link_where_no_file_names_it(tmp_path: Path) -> None:
    (tmp_path / "opt/dtk-26.04-DCC2602-0317").mkdir(parents=True)
    (tmp_path / "opt/dtk").symlink_to("dtk-26.04-DCC2602-0317")
    assert _machine(tmp_path).dtk_version() == "26.04"


def test_a_driver_directory_that_is_not_mounted_is_found(dcu: Path) -> None:
    (dcu / "opt/hyhal").rmdir()
    finding = _found(check_devices(_machine(dcu, env=HEALTHY)), "DTK environment")
    assert finding.status is Status.FAILED
    assert "/opt/hyhal" in finding.remedy


def test_a_missing_device_file_is_named(dcu: Path) -> None:
    (dcu / "dev/kfd").rmdir()
    finding = _found(check_devices(_machine(dcu)), "device files")
    assert (finding.status, finding.detail) == (Status.FAILED, "missing: /dev/kfd")


# As the vendors' tools print it: Hygon MiB in strings, AMD bytes in strings, a warning before.
HYGON = '{"card0": {"vram Total Memory (MiB)": "65520", "vram Total Used Memory (MiB)": "3"}}'
BUSY = '{"card1": {"vram Total Memory (MiB)": "65520", "vram Total Used Memory (MiB)": "8192"}}'
AMD = (
    'WARNING\n{"card0": {"VRAM Total Memory (B)": "64", "VRAM Total Used Memory (B)": "10485760"}}'
)


@pytest.mark.parametrize(
    ("text", "used"), [(HYGON, {"0": 3}), (BUSY, {"1": 8192}), (AMD, {"0": 10}), ("", {})]
)
def test_used_memory_is_read_in_either_unit(text: str, used: dict[str, float]) -> None:
    assert parse_used_memory(text) == used


@pytest.mark.parametrize(
    ("text", "status"), [(HYGON, Status.OK), (BUSY, Status.WARNING), ("", Status.WARNING)]
)
def test_memory_held_before_any_job_is_found(text: str, status: Status, dcu: Path) -> None:
    finding = _found(check_devices(_machine(dcu, tools={"hy-smi": text})), "memory in use")
    assert finding.status is status


def test_a_translating_iommu_is_found(dcu: Path) -> None:
    (dcu / "sys/kernel/iommu_groups/0").mkdir(parents=True)
    finding = _found(check_devices(_machine(dcu)), "IOMMU")
    assert finding.status is Status.WARNING


def test_a_low_map_count_is_found(dcu: Path) -> None:
    (dcu / "proc/sys/vm").mkdir(parents=True)
    (dcu / "proc/sys/vm/max_map_count").write_text("65530\n")
    assert _found(check_host(_machine(dcu)), "memory maps").status is Status.WARNING


def test_a_machine_that_counts_no_kills_is_found(dcu: Path) -> None:
    assert _found(check_host(_machine(dcu)), "kernel kill counter").status is Status.WARNING


def test_on_a_cpu_what_is_only_for_accelerators_does_not_apply(tmp_path: Path) -> None:
    machine = _machine(tmp_path, DeviceKind.CPU)
    findings = {finding.name: finding for finding in check_devices(machine)}
    debug = findings.pop("debug variables")
    assert debug.status is Status.OK
    assert {finding.status for finding in findings.values()} == {Status.NOT_APPLICABLE}
    assert all("does not apply here" in finding.detail for finding in findings.values())


@pytest.mark.parametrize("kind", list(DeviceKind))
def test_every_fault_comes_with_a_remedy(kind: DeviceKind, tmp_path: Path) -> None:
    machine = _machine(tmp_path, kind, packages={})
    for check in (check_packages, check_devices, check_host):
        for finding in check(machine):
            needs_one = finding.status in (Status.WARNING, Status.FAILED)
            assert bool(finding.remedy) is needs_one, finding


def test_this_machine_is_examined_with_torch_in_a_process_of_its_own() -> None:
    machine = Machine.detect()
    findings, measured = examine(machine)
    document: dict[str, Any] = json.loads(json.dumps(to_json(machine, findings, measured)))
    by_name = {check["name"]: check for check in document["checks"]}
    for name in ("bf16 matmul", "attention", "activation checkpointing", "collectives", "sharding"):
        assert by_name[name]["status"] == "ok", by_name[name]
    assert document["healthy"] is True


def test_a_check_that_kills_its_process_is_the_one_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dying.py").write_text(
        "import os, sys\n"
        'print(\'{"begins": "attention"}\', flush=True)\n'
        "sys.stderr.write('ImportError: libgalaxyhip.so.5: cannot open')\n"
        "sys.stderr.flush()\n"
        "os.abort()\n"
    )
    monkeypatch.setattr("services.shared.launch.doctor.doctor._SELFCHECK", "dying")
    machine = _machine(tmp_path, env={"PYTHONPATH": str(tmp_path)})
    finding = examine(machine)[0][-1]
    assert (finding.name, finding.status) == ("attention", Status.FAILED)
    assert "env.sh" in finding.remedy
