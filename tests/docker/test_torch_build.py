"""Keeping a vendor's torch: what torch_build.py reports about the distributions on a path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker" / "torch_build.py"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory with a DTK build of torch and its numpy; torch cannot be imported."""
    add(tmp_path, "torch", "2.5.1+das.opt1.dtk2604")
    add(tmp_path, "Flash_Attn", "2.8.3+das.opt1.dtk2604.torch251")
    add(tmp_path, "numpy", "1.25.0")
    add(tmp_path, "fastapi", "0.1")
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libgalaxyhip.so.5')\n")
    (package / "version.py").write_text("__version__ = '2.5.1'\ncuda = None\nhip = '6.3.26045'\n")
    return tmp_path


def add(site: Path, name: str, version: str) -> None:
    directory = site / f"{name}-{version}.dist-info"
    directory.mkdir()
    (directory / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )


def run_script(
    site: Path, *arguments: str, given: str = "", code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-S", str(SCRIPT), *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(site)},
    )
    assert done.returncode == code, done.stderr
    return done


def test_a_build_is_described_without_being_imported(site: Path) -> None:
    line = run_script(site, "describe").stdout
    assert line == "torch 2.5.1+das.opt1.dtk2604 hip=6.3.26045 cuda=None\n"


def test_an_image_without_torch_has_an_empty_description(tmp_path: Path) -> None:
    assert run_script(tmp_path, "describe").stdout.strip() == ""


def test_the_vendors_packages_are_pinned_to_their_versions(site: Path) -> None:
    assert run_script(site, "pins").stdout.splitlines() == [
        "flash-attn==2.8.3+das.opt1.dtk2604.torch251",
        "numpy==1.25.0",
        "torch==2.5.1+das.opt1.dtk2604",
    ]


def test_our_own_pins_for_them_are_dropped(site: Path) -> None:
    ours = (
        "fastapi==0.165.0\nflash_attn==1\nnumpy==2.4.6\n# numpy\ntorch==2.13.0\ntorchmetrics==1\n"
    )
    kept = run_script(site, "without-pins", given=ours).stdout
    assert kept == "fastapi==0.165.0\n# numpy\ntorchmetrics==1\n"


def test_of_two_builds_the_imported_one_is_described(site: Path, tmp_path: Path) -> None:
    over = tmp_path / "venv"
    over.mkdir()
    add(over, "torch", "2.5.1")
    (over / "torch").mkdir()
    (over / "torch" / "version.py").write_text("cuda = '12.4'\nhip = None\n")
    done = subprocess.run(
        [sys.executable, "-S", str(SCRIPT), "describe"],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": f"{over}:{site}"},
    )
    assert done.stdout == "torch 2.5.1 hip=None cuda=12.4\n"


@pytest.mark.parametrize(
    ("backend", "line"),
    [
        ("", "torch 2.13.0+cpu hip=None cuda=None"),
        ("hip", "torch 2.5.1+das hip=6.3 cuda=None"),
        ("cuda", "torch 2.13.0 hip=None cuda=13.0"),
    ],
)
def test_a_build_for_the_right_accelerator_passes(tmp_path: Path, backend: str, line: str) -> None:
    run_script(tmp_path, "require", backend, line)


@pytest.mark.parametrize(
    ("backend", "line", "complaint"),
    [
        ("hip", "torch 2.5.1 hip=None cuda=12.4", "was not built for hip"),
        ("cuda", "torch 2.13.0+cpu hip=None cuda=None", "was not built for cuda"),
        ("", "", "no torch is installed"),
        ("dcu", "torch 2.5.1 hip=6.3 cuda=None", "hip and cuda are known"),
    ],
)
def test_a_build_for_another_accelerator_fails_the_image_build(
    tmp_path: Path, backend: str, line: str, complaint: str
) -> None:
    assert complaint in run_script(tmp_path, "require", backend, line, code=1).stderr
