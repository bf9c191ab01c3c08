"""Writing a Hugging Face model directory."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from services.cli.pretrained.blocks import Floats


@dataclass(frozen=True)
class ModelFiles:
    """What a model directory consists of, in memory."""

    config: dict[str, Any]
    tensors: dict[str, Floats]
    documents: dict[str, Any]  # JSON files by relative path
    texts: dict[str, str] = field(default_factory=dict)  # other files by relative path


def write_model(directory: Path, files: ModelFiles) -> None:
    """Write the files. Raises OSError."""
    directory.mkdir(parents=True)
    tensors = {name: values.copy(order="C") for name, values in files.tensors.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    for name, document in {"config.json": files.config, **files.documents}.items():
        path = directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", "utf-8")
    for name, text in files.texts.items():
        (directory / name).write_text(text, "utf-8")
