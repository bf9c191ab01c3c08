from pathlib import Path

import pytest

from services.shared.launch.devices import (
    DeviceKind,
    allowed_numa_nodes,
    detect_device_kind,
    device_kind,
    first_json_object,
    numa_binding_unsupported_reason,
    parse_numa_topology,
)


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ("cpu", DeviceKind.CPU),
        ("k100_ai", DeviceKind.DCU),
        ("K100_AI", DeviceKind.DCU),
        ("bw1000", DeviceKind.DCU),
        ("z100l", DeviceKind.DCU),
        ("mi300x", DeviceKind.ROCM),
        ("910b", DeviceKind.NPU),
        ("a100-80", DeviceKind.CUDA),
        ("rtx4090", DeviceKind.CUDA),
    ],
)
def test_a_device_name_determines_its_family(device: str, kind: DeviceKind) -> None:
    assert device_kind(device) is kind


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ([], DeviceKind.CPU),
        (["dev/kfd", "dev/dri"], DeviceKind.ROCM),
        (["dev/kfd", "opt/hyhal"], DeviceKind.DCU),
        (["dev/kfd", "dev/mkfd"], DeviceKind.DCU),
        (["dev/kfd", "opt/dtk"], DeviceKind.DCU),
        (["dev/nvidiactl"], DeviceKind.CUDA),
    ],
)
def test_device_files_determine_the_family(
    files: list[str], kind: DeviceKind, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).mkdir(parents=True)
    assert detect_device_kind(tmp_path) is kind


def test_numa_nodes_are_read_through_noise_and_either_spelling_of_a_card() -> None:
    text = (
        "\x1b[33mWARNING: {not json}\x1b[0m\n"
        '{"card0": {"(Topology) Numa Node": "0", "(Topology) Numa Affinity": "0"},'
        ' "HCU[4]": {"(Topology) Numa Node": "4"}, "system": "x"}'
    )
    assert parse_numa_topology(text) == {0: 0, 4: 4}


@pytest.mark.parametrize("text", ["", "no json", "{", "[1]", '{"card0": "Numa Node 3"}'])
def test_output_that_is_no_topology_gives_no_nodes(text: str) -> None:
    assert parse_numa_topology(text) == {}


def test_the_first_whole_object_is_taken() -> None:
    assert first_json_object('{"a": {broken} {"b": 1} {"c": 2}') == {"b": 1}


def test_binding_needs_the_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.shared.launch.devices.shutil.which", lambda name: "/bin/numactl")
    assert numa_binding_unsupported_reason("CapBnd:\t00000000a80425fb\n") == (
        "CAP_SYS_NICE cannot be had (container: cap_add SYS_NICE)"
    )
    assert numa_binding_unsupported_reason("CapBnd:\t00000000a8c425fb\n") is None


def test_the_cpuset_is_read_with_its_ranges() -> None:
    assert allowed_numa_nodes("Mems_allowed_list:\t0-2,5\n") == {0, 1, 2, 5}
