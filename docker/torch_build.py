"""Identifies the torch build of an image and keeps pip from replacing it.

    torch_build.py describe              one line (version, hip, cuda), empty without torch
    torch_build.py pins                  constraints for torch and related packages as installed
    torch_build.py without-pins          standard input without the lines that `pins` covers
    torch_build.py require BACKEND LINE  exits 1 unless LINE of `describe` names BACKEND (hip, cuda)

Torch itself is not imported: a vendor's build needs the driver for that, which is absent during an image build. The
full version (`2.5.1+das.opt1.dtk2604`) is in the distribution's metadata.
"""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata

RELATED_PACKAGES = (
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
    """Return a distribution's normalised name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, metadata.Distribution]:
    """Return torch and related packages by normalised name; of duplicates, the one that is imported."""
    found: dict[str, metadata.Distribution] = {}
    for distribution in metadata.distributions():
        name = normalised(distribution.metadata["Name"] or "")
        if name in RELATED_PACKAGES:
            found.setdefault(name, distribution)
    return found


def describe() -> str:
    """Return version and backends of torch; empty without torch."""
    torch = installed().get("torch")
    if torch is None:
        return ""
    build = runpy.run_path(str(torch.locate_file("torch/version.py")))
    return f"torch {torch.version} hip={build.get('hip')} cuda={build.get('cuda')}"


def pins() -> Iterator[str]:
    """Yield a constraint for each installed package of RELATED_PACKAGES."""
    for name, distribution in sorted(installed().items()):
        yield f"{name}=={distribution.version}\n"


def without_pins(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a constraints file that do not constrain such a package."""
    kept = installed()
    for line in lines:
        if normalised(re.split(r"[=<>~! \[;@]", line.strip())[0]) not in kept:
            yield line


def build_mismatch(backend: str, line: str) -> str | None:
    """Return why the build that `line` describes is unsuitable, or None."""
    if backend not in ("", "hip", "cuda"):
        return f"TORCH_BACKEND is {backend!r}; hip and cuda are known"
    if not line:
        return "no torch is installed"
    if backend and f"{backend}=None" in line:
        return f"[{line}] was not built for {backend}: choose an image with such a torch"
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
            problem = build_mismatch(backend, line)
            if problem is not None:
                sys.exit(f"torch_build.py: {problem}")
        case _:
            sys.exit(f"torch_build.py: unknown arguments {' '.join(arguments)!r}")


if __name__ == "__main__":
    main(sys.argv[1:])
