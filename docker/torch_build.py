"""Tells which build of torch an image carries, and keeps pip from replacing it.

    torch_build.py describe              one line (version, hip, cuda), empty without torch
    torch_build.py pins                  constraints for torch and its companions as they are installed
    torch_build.py without-pins          standard input less the lines that `pins` covers
    torch_build.py require BACKEND LINE  exits 1 unless LINE of `describe` names BACKEND (hip, cuda)

Torch itself is not imported: a vendor's build needs the driver for that, which no image build sees. The
full version (`2.5.1+das.opt1.dtk2604`) stands in the distribution's metadata.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

COMPANIONS = (
    "apex",
    "deepspeed",
    "flash-attn",
    "numpy",
    "pytorch-triton",
    "pytorch-triton-rocm",
    "torch",
    "torchao",
    "torchaudio",
    "torchvision",
    "triton",
    "xformers",
)


def normalised(name: str) -> str:
    """Return a distribution's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, metadata.Distribution]:
    """Return torch and its companions by normalised name; of two, the one that is imported."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        name = normalised(distribution.metadata["Name"] or "")
        if name in COMPANIONS:
            found.setdefault(name, distribution)
    return found


def describe() -> str:
    """Return version and back ends of torch; empty where there is none."""
    torch = installed().get("torch")
    if torch is None:
        return ""
    build = runpy.run_path(str(torch.locate_file("torch/version.py")))
    return f"torch {torch.version} hip={build.get('hip')} cuda={build.get('cuda')}"


def pins() -> Iterator[str]:
    """Yield a constraint for each installed companion."""
    for name, distribution in sorted(installed().items()):
        yield f"{name}=={distribution.version}\n"


def without_pins(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a constraints file that name none of the installed companions."""
    kept = installed()
    for line in lines:
        if normalised(re.split(r"[=<>~! \[;@]", line.strip())[0]) not in kept:
            yield line


def objection(backend: str, line: str) -> str | None:
    """Return what is wrong with the build that `line` describes, or None."""
    if backend not in ("", "hip", "cuda"):
        return f"TORCH_BACKEND is {backend!r}; hip and cuda are known"
    if not line:
        return "no torch is installed"
    if backend and f"{backend}=None" in line:
        return f"[{line}] was not built for {backend}: name an image that carries such a torch"
    return None


def main(arguments: list[str]) -> None:
    match arguments:
        case ["describe"]:
            print(describe())
        case ["pins"]:
            sys.stdout.writelines(pins())
        case ["without-pins"]:
            sys.stdout.writelines(without_pins(sys.stdin))
        case ["require", backend, line]:
            problem = objection(backend, line)
            if problem is not None:
                sys.exit(f"torch_build.py: {problem}")
        case _:
            sys.exit(f"torch_build.py: what is {' '.join(arguments)!r}?")


if __name__ == "__main__":
    main(sys.argv[1:])
