"""What lies beside an artifact that was prepared for 8-bit serving, and whether it may serve. Torch-free.

<artifact>/prepared/packed-int8.safetensors   written by `prepared`
<artifact>/prepared/packed-int8.json          PreparedInt8
<artifact>/prepared/packed-int8.lock          held by the process that prepares
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.jobs.gates import Int8Gate
from services.shared.jobs.run_directory import write_json

FORMAT = 2

# As in model.artifact, which cannot be imported here: that room loads torch.


class PreparedInt8(Int8Gate):
    """What was prepared, from what, and whether it may serve."""

    format: int = FORMAT
    manifest_sha256: str  # of the artifact that it was made from
    weights_sha256: str  # of packed-int8.safetensors
    largest_activation: int  # of the processor that compared: 127, or 63 without VNNI


def prepared_weights(artifact_dir: Path) -> Path:
    """Return where the prepared weights of an artifact lie."""
    return artifact_dir / "prepared" / "packed-int8.safetensors"


def manifest_hash(artifact_dir: Path) -> str:
    """Return what identifies an artifact: the hash of its manifest, which holds those of its files."""
    return hashlib.sha256((artifact_dir / MANIFEST).read_bytes()).hexdigest()


def read_prepared(artifact_dir: Path) -> PreparedInt8 | None:
    """Return what was prepared for this very artifact; None where nothing valid was."""
    path = prepared_weights(artifact_dir).with_suffix(".json")
    try:
        prepared = PreparedInt8.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    if prepared.format != FORMAT or not prepared_weights(artifact_dir).exists():
        return None
    if prepared.manifest_sha256 != manifest_hash(artifact_dir):
        return None  # the artifact was exported anew since
    return prepared


def gate_of(prepared: PreparedInt8) -> Int8Gate:
    """Return the decision and its figures without what binds them to files."""
    return Int8Gate.model_validate(prepared.model_dump(include=set(Int8Gate.model_fields)))


def write_prepared(artifact_dir: Path, prepared: PreparedInt8) -> None:
    """Record what was prepared; the weights are in place already."""
    write_json(prepared_weights(artifact_dir).with_suffix(".json"), prepared)
