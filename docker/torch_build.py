"""Tells which build of torch an image carries, and keeps pip from replacing it.

    torch_build.py describe       one line (version, hip, cuda), empty without torch
    torch_build.py pins           constraints for torch and its companions as they are installed
    torch_build.py without-pins   standard input less the lines that `pins` covers

The full version (`2.5.1+das.opt1.dtk2604`) stands in the distribution's metadata; `torch.__version__`
may leave the local part out.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata

COMPANIONS = (
    "apex",
    "deepspeed",
    "flash-attn",
    "numpy",
    "pytorch-triton",
    "torch",
    "torchao",
    "torchaudio",
    "torchvision",
    "triton",
    "xformers",
)


def installed() -> dict[str, str]:
    """Return the versions of torch and its companions, by normalised name."""
    found = {}
    for distribution in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if name in COMPANIONS:
            found[name] = distribution.version
    return found


def describe() -> str:
    """Return version and back end of torch; empty where there is none."""
    versions = installed()
    if "torch" not in versions:
        return ""
    import torch

    return f"torch {versions['torch']} hip={torch.version.hip} cuda={torch.version.cuda}"


def main(command: str) -> None:
    if command == "describe":
        print(describe())
    elif command == "pins":
        print("".join(f"{name}=={version}\n" for name, version in sorted(installed().items())))
    elif command == "without-pins":
        kept = installed()
        for line in sys.stdin:
            name = re.sub(r"[-_.]+", "-", re.split(r"[=<>~! \[;]", line.strip())[0]).lower()
            if name not in kept:
                print(line, end="")
    else:
        raise SystemExit(f"torch_build.py: unknown command {command!r}")


if __name__ == "__main__":
    main(sys.argv[1])
