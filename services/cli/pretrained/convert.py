"""Converts one package's weights, in a process of its own: numpy and safetensors stay out of the command line.

Run as a module: `python -m services.cli.pretrained.convert NAME PACKAGE DIRECTORY`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from services.cli.pretrained import e5_model, minilm_model, smollm2_model
from services.cli.pretrained.directory import write_model
from services.cli.pretrained.errors import UnreadableWeights

READERS = {
    "multilingual-e5-small": e5_model.read_model,
    "smollm2-135m": smollm2_model.read_model,
    "all-minilm-l6-v2": minilm_model.read_model,
}


def convert(name: str, package: Path, directory: Path) -> None:
    """Write the model directory. Raises UnreadableWeights, OSError."""
    write_model(directory, READERS[name](package))


if __name__ == "__main__":
    try:
        convert(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
    except (UnreadableWeights, OSError) as error:
        sys.exit(str(error))
