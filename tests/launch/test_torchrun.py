from pathlib import Path

import pytest

from services.shared.jobs.planning.auto_choices import num_cores
from services.shared.jobs.spec import Resources
from services.shared.launch.processes import NUMA_NODES
from services.shared.launch.torchrun import plan_launch, rank_environment

DCU = Resources(ranks=2, device="k100_ai")
CPU = Resources(ranks=2, device="cpu")
CUDA = Resources(ranks=2, device="a100-80")


def test_a_dcu_job_names_its_cards_in_hip_visible_devices_alone() -> None:
    seven = Resources(ranks=7, device="k100_ai", visible_devices=[1, 2, 3, 4, 5, 6, 7])
    env = rank_environment(
        seven,
        environment={
            "ROCR_VISIBLE_DEVICES": "0,1",
            "CUDA_VISIBLE_DEVICES": "0,1",
            "HIP_VISIBLE_DEVICES": "0",
        },
    )
    assert env["HIP_VISIBLE_DEVICES"] == "1,2,3,4,5,6,7"
    assert "ROCR_VISIBLE_DEVICES" not in env
    assert "CUDA_VISIBLE_DEVICES" not in env


@pytest.mark.parametrize("resources", [DCU, CPU, CUDA, Resources(ranks=1, device="mi300x")])
def test_an_empty_visible_devices_variable_never_reaches_a_rank(resources: Resources) -> None:
    empty = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
    env = rank_environment(resources, environment=empty)
    assert "CUDA_VISIBLE_DEVICES" not in env
    assert "HIP_VISIBLE_DEVICES" not in env


def test_a_dcu_job_without_a_choice_of_cards_keeps_the_operators_own() -> None:
    env = rank_environment(DCU, environment={"HIP_VISIBLE_DEVICES": "4,5"})
    assert env["HIP_VISIBLE_DEVICES"] == "4,5"


def test_an_amd_job_keeps_the_subset_that_rocr_renumbers() -> None:
    resources = Resources(ranks=2, device="mi300x", visible_devices=[0, 1])
    env = rank_environment(resources, environment={"ROCR_VISIBLE_DEVICES": "4,5,6"})
    assert (env["ROCR_VISIBLE_DEVICES"], env["HIP_VISIBLE_DEVICES"]) == ("4,5,6", "0,1")


def test_a_cuda_job_names_its_cards_in_cuda_visible_devices() -> None:
    resources = Resources(ranks=2, device="h100", visible_devices=[2, 3])
    assert rank_environment(resources, environment={})["CUDA_VISIBLE_DEVICES"] == "2,3"


@pytest.mark.parametrize(("device", "value"), [("k100_ai", "1"), ("mi300x", "1"), ("h100", None)])
def test_fine_grained_pcie_is_forced_where_rccl_asks_for_it(device: str, value: str | None) -> None:
    env = rank_environment(Resources(ranks=2, device=device), environment={})
    assert env.get("HSA_FORCE_FINE_GRAIN_PCIE") == value


def test_an_allocator_setting_reaches_every_torch_under_the_name_it_reads() -> None:
    env = rank_environment(
        DCU, environment={"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"}
    )
    names = ("PYTORCH_HIP_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    assert [env[name] for name in names] == ["garbage_collection_threshold:0.8"] * 3


def test_expandable_segments_are_the_default_on_cuda_only() -> None:
    env = rank_environment(CUDA, environment={})
    assert env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert "PYTORCH_HIP_ALLOC_CONF" not in rank_environment(DCU, environment={})


@pytest.mark.parametrize(
    ("resources", "offloads", "threads"),
    [
        (CPU, False, max(1, num_cores() // 2)),
        (DCU, False, 1),
        (DCU, True, max(1, num_cores() // 2)),
    ],
)
def test_ranks_share_the_cores_where_they_compute_on_them(
    resources: Resources, offloads: bool, threads: int
) -> None:
    env = rank_environment(resources, environment={}, offloads=offloads)
    assert env["OMP_NUM_THREADS"] == str(threads)


def test_what_the_operator_has_set_is_kept() -> None:
    given = {"OMP_NUM_THREADS": "7", "GLOO_SOCKET_IFNAME": "eth0", "HSA_FORCE_FINE_GRAIN_PCIE": "0"}
    assert rank_environment(DCU, environment=given).items() >= given.items()


def test_ranks_do_not_get_the_address_of_the_database() -> None:
    secrets = {"STILLHOUSE_DATABASE_URL": "postgresql://", "STILLHOUSE_BROKER_URL": "redis://"}
    assert not rank_environment(CPU, environment=secrets).keys() & secrets.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(name, "planted") for name in ("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD")],
        *[(name, "planted") for name in ("REDISCLI_AUTH", "STILLHOUSE_API_KEY", "OPENAI_APIKEY")],
        ("HTTPS_PROXY", "http://somebody:planted@proxy:3128"),
        ("ANY_URL", "redis://:planted@host/0"),
    ],
)
def test_ranks_get_no_secret_of_any_name(name: str, value: str) -> None:
    assert name not in rank_environment(CPU, environment={name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "true"),
        ("KEYBOARD", "us"),
        ("HTTPS_PROXY", "http://proxy:3128"),
        ("NCCL_SOCKET_IFNAME", "ib0"),
    ],
)
def test_ranks_get_what_is_no_secret(name: str, value: str) -> None:
    assert rank_environment(CPU, environment={name: value})[name] == value


def test_gloo_uses_the_loopback_interface() -> None:
    assert rank_environment(CPU, environment={})["GLOO_SOCKET_IFNAME"] == "lo"


def test_ranks_on_a_cpu_get_huge_pages_unless_the_operator_decided() -> None:
    assert rank_environment(CPU, environment={})["THP_MEM_ALLOC_ENABLE"] == "1"
    off = {"THP_MEM_ALLOC_ENABLE": "0"}
    assert rank_environment(CPU, environment=off)["THP_MEM_ALLOC_ENABLE"] == "0"
    assert "THP_MEM_ALLOC_ENABLE" not in rank_environment(DCU, environment={})


def test_the_command_runs_the_module_on_every_rank_of_one_node() -> None:
    command = plan_launch(
        "services.trainer.main", Path("/r"), resources=CPU, environment={}
    ).command
    assert command[command.index("--nproc-per-node") + 1] == "2"
    assert command[-3:] == ["-m", "services.trainer.main", "/r"]
    assert "--standalone" in command


def test_ranks_on_a_cpu_are_not_bound_and_no_warning_is_given() -> None:
    launch = plan_launch("m", Path("/r"), resources=CPU, environment={})
    assert NUMA_NODES not in launch.env
    assert launch.warnings == []


def test_ranks_are_bound_to_the_nodes_of_the_cards_they_really_get(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "services.shared.launch.torchrun."
    monkeypatch.setattr(module + "numa_binding_unsupported_reason", lambda: None)
    monkeypatch.setattr(module + "numa_nodes", lambda kind: {1: 0, 3: 0, 4: 4, 6: 9})
    monkeypatch.setattr(module + "allowed_numa_nodes", lambda: {0, 4})
    resources = Resources(ranks=3, device="k100_ai", visible_devices=[4, 1, 6])
    launch = plan_launch("m", Path("/r"), resources=resources, environment={})
    # Card 6 is on a node outside the cpuset: that rank stays unbound.
    assert launch.env[NUMA_NODES] == "4,0,"


def test_a_machine_without_numactl_runs_unbound_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.shared.launch.devices.shutil.which", lambda *a, **k: None)
    launch = plan_launch("m", Path("/r"), resources=DCU, environment={})
    assert launch.warnings == ["Ranks are not bound to NUMA nodes: numactl is not installed."]
    assert NUMA_NODES not in launch.env
