"""The record of an artifact's quantization to 8 bits, which says whether it may serve. Torch-free.

<artifact>/prepared/packed-int8.safetensors   written by `weights_file`
<artifact>/prepared/packed-int8.json          QuantizationRecord
<artifact>/prepared/packed-int8.lock          held by the process that quantizes
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from pydantic import ValidationError

from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.jobs.gates import Int8Gate
from services.shared.jobs.run_directory import write_json

FORMAT = 2
PACKED_KIND = "packed"  # how the names of the engines begin whose students can be quantized
INT8_KIND = f"{PACKED_KIND}-int8"  # the engine's name, and that of the files


class QuantizationRecord(Int8Gate):
    """The gate's decision, bound to the artifact, the weights and the kind of CPU it was made for."""

    format: int = FORMAT
    manifest_sha256: str  # of the artifact that was quantized
    weights_sha256: str  # of packed-int8.safetensors
    largest_activation: int  # activation limit of the CPU that compared: 127, or 63 without VNNI

    def gate(self) -> Int8Gate:
        """Return the decision and its figures without what binds them to files."""
        return Int8Gate.model_validate(self.model_dump(include=set(Int8Gate.model_fields)))


def int8_weights_path(artifact_dir: Path) -> Path:
    """Return the path of an artifact's int8 weights."""
    return artifact_dir / "prepared" / f"{INT8_KIND}.safetensors"


def manifest_sha256_of(artifact_dir: Path) -> str:
    """Return the hash of an artifact's manifest, which contains the hashes of its files."""
    return hashlib.sha256((artifact_dir / MANIFEST).read_bytes()).hexdigest()


def read_quantization_record(artifact_dir: Path) -> QuantizationRecord | None:
    """Return the record of this version of the artifact, None if there is no valid one."""
    path = int8_weights_path(artifact_dir).with_suffix(".json")
    try:
        record = QuantizationRecord.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    if record.format != FORMAT or not int8_weights_path(artifact_dir).exists():
        return None
    if record.manifest_sha256 != manifest_sha256_of(artifact_dir):
        return None  # the artifact has been exported again since
    return record


def write_quantization_record(artifact_dir: Path, record: QuantizationRecord) -> None:
    """Write the record. The weights must be in place already."""
    write_json(int8_weights_path(artifact_dir).with_suffix(".json"), record)
