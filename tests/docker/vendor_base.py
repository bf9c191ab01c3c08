"""A worker image on a vendor's base: `python -m tests.docker.vendor_base`, part of `make compose-test`.

The base stands in for a DTK image: a torch of a vendor's version that imports only in the environment of
/opt/dtk/env.sh, an older numpy, and an env.sh that reads variables which are not set. The build must keep
both packages, and commands must find that environment.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.docker.end_to_end import expect

ROOT = Path(__file__).resolve().parents[2]
BASE = "stillhouse-e2e/vendor:latest"
WORKER = "stillhouse-e2e/trainer-vendor:latest"

_DOCKERFILE = """\
FROM python:3.11-slim-bookworm
COPY packages /tmp/packages
RUN cp -r /tmp/packages/. "$(python3 -c 'import site; print(site.getsitepackages()[0])')"
COPY env.sh /opt/dtk/env.sh
"""
_ENV_SH = """\
export LD_LIBRARY_PATH=/opt/dtk/hip/lib:$LD_LIBRARY_PATH
export ROCM_PATH=/opt/dtk
false
"""
_TORCH = """\
import os

if os.environ.get("ROCM_PATH") != "/opt/dtk":
    raise ImportError("libgalaxyhip.so.5: cannot open shared object file")
from . import version
"""
_VERSION = "__version__ = '2.5.1'\ncuda = None\nhip = '6.3.26045'\n"
_VERSIONS = {"torch": "2.5.1+das.opt1.dtk2604", "numpy": "1.26.1"}
_SHOW = (
    "from importlib.metadata import version; import torch, celery, services; "
    "print(version('torch'), torch.version.hip, version('numpy'), version('transformers'))"
)


def main() -> None:
    """Build the base and a worker on it, and check the worker's packages."""
    if shutil.which("docker") is None:
        sys.exit("vendor_base: docker was not found")
    try:
        build_base()
        refused = build("python:3.11-slim-bookworm", "hip", check=False)
        expect(refused.returncode != 0, "a base without torch is refused for hip")
        expect("no torch is installed" in refused.stdout + refused.stderr, refused.stderr)
        print("a base without the vendor's torch was refused before anything was fetched")
        build(BASE, "hip")
        found = docker("run", "--rm", WORKER, "python", "-c", _SHOW).stdout.split()
        expect(found == [_VERSIONS["torch"], "6.3.26045", _VERSIONS["numpy"], "5.12.1"], f"{found}")
        print(f"kept: torch {found[0]} (hip {found[1]}), numpy {found[2]}")
        bare = docker(
            *("run", "--rm", "--entrypoint", "python", WORKER, "-c", "import torch"), check=False
        )
        expect("libgalaxyhip" in bare.stderr, "without the entrypoint this torch does not import")
        print("the entrypoint brings the environment of env.sh, unset variables and failures aside")
    finally:
        docker("image", "rm", "--force", WORKER, BASE, check=False)


def build_base() -> None:
    with tempfile.TemporaryDirectory() as directory:
        context = Path(directory)
        for name, version in _VERSIONS.items():
            information = context / "packages" / f"{name}-{version}.dist-info"
            information.mkdir(parents=True)
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (information / "METADATA").write_text(metadata)
            (information / "INSTALLER").write_text("vendor\n")
            (information / "RECORD").write_text("")
            (context / "packages" / name).mkdir()
            (context / "packages" / name / "__init__.py").touch()
        (context / "packages" / "torch" / "__init__.py").write_text(_TORCH)
        (context / "packages" / "torch" / "version.py").write_text(_VERSION)
        (context / "env.sh").write_text(_ENV_SH)
        (context / "Dockerfile").write_text(_DOCKERFILE)
        docker("build", "--quiet", "--tag", BASE, str(context))


def build(base: str, backend: str, *, check: bool = True) -> subprocess.CompletedProcess[str]:
    arguments = {
        "BASE_IMAGE": base,
        "CONSTRAINTS": "constraints.compat.txt",
        "TORCH_BACKEND": backend,
    }
    command = ["build", "--target", "trainer", "--tag", WORKER, "--file", "docker/Dockerfile"]
    for name, value in arguments.items():
        command += ["--build-arg", f"{name}={value}"]
    return docker(*command, ".", check=check)


def docker(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["docker", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if check and done.returncode != 0:
        raise RuntimeError(f"docker {arguments[0]}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done


if __name__ == "__main__":
    main()
