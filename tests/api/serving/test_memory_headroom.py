"""The memory that loading a student needs, and the memory available."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from services.api.serving.memory_headroom import (
    LOADING_PEAK_RATIO,
    available_bytes,
    bytes_per_weight,
    check_headroom,
    serving_bytes,
)
from services.api.serving.promotion import StudentRefused
from services.api.serving.settings import ServingDtype, ServingSettings
from services.shared.jobs.planning.auto_choices import bf16_is_faster

MIB = 1024**2
WEIGHTS = 4 * MIB


@pytest.fixture
def artifact(tmp_path: Path) -> Path:
    tensors = {"a": torch.zeros(1024, 2048), "b": torch.zeros(2 * MIB)}
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "m.safetensors"
    )
    return tmp_path


@pytest.mark.parametrize(("dtype", "size"), [(ServingDtype.BFLOAT16, 2), (ServingDtype.FLOAT32, 4)])
def test_weights_count_in_their_serving_dtype(
    artifact: Path, dtype: ServingDtype, size: int
) -> None:
    settings = ServingSettings(dtype=dtype, memory_reserve_bytes=7 * MIB)
    assert bytes_per_weight(settings) == size
    assert serving_bytes(artifact, bytes_per_weight=size) == WEIGHTS * size
    enough = int(WEIGHTS * size * LOADING_PEAK_RATIO) + 7 * MIB
    check_headroom(artifact, settings, available=enough)
    with pytest.raises(StudentRefused, match=f"{WEIGHTS * size // MIB} MiB") as refused:
        check_headroom(artifact, settings, available=enough - 1)
    assert refused.value.transient


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("AuthenticAMD", "fpu avx512_bf16 sse", True),
        ("GenuineIntel", "avx512_bf16 amx_bf16 amx_tile", True),
        ("GenuineIntel", "avx512_bf16", False),
        ("AuthenticAMD", "avx2", False),
    ],
)
def test_cpu_flags_tell_whether_bfloat16_is_faster(
    tmp_path: Path, vendor: str, flags: str, expected: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert not bf16_is_faster(cpuinfo)
    cpuinfo.write_text(f"vendor_id : {vendor}\nflags : {flags}\n")
    assert bf16_is_faster(cpuinfo) is expected


def test_without_fast_bfloat16_weights_count_as_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.api.serving.memory_headroom.bf16_is_faster", lambda: False)
    assert bytes_per_weight(ServingSettings(device="cpu")) == 4
    assert bytes_per_weight(ServingSettings(device="cuda:1")) == 2


def test_a_container_limit_does_not_count_cached_files(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{100 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{90 * MIB}\n")
    assert available_bytes(tmp_path) == 10 * MIB
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {30 * MIB}\nactive_file 5\n")
    assert available_bytes(tmp_path) == 40 * MIB


def test_without_a_limit_the_memory_of_the_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1\n")
    assert available_bytes(tmp_path) > psutil.virtual_memory().total // 1000


def test_an_invalid_safetensors_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="not a safetensors file"):
        serving_bytes(tmp_path, bytes_per_weight=2)
