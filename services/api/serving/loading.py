"""From a promoted artifact to a student that is loaded, checked and warm. The one door to torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from services.api.serving.encoder import TokenizerEncoder
from services.api.serving.engine import Engine, warm_up
from services.api.serving.golden import check_golden
from services.api.serving.prediction import Calibration
from services.api.serving.promoted import Promoted
from services.api.serving.settings import ServingDtype, ServingSettings
from services.api.serving.slot import ActiveStudent
from services.api.serving.threads import use_threads
from services.api.serving.transformers_engine import TransformersEngine
from services.shared.model.artifact import load_classifier, read_artifact
from services.shared.model.tokens import load_tokenizer

# Where neither heads.json nor manifest.json says how long the texts of training were.
DEFAULT_MAX_LENGTH = 512


def load_student(
    promoted: Promoted, settings: ServingSettings, *, current: ActiveStudent | None
) -> ActiveStudent:
    """Load, check and warm the promoted student.

    Raises StudentRefused where it does not answer its golden texts, ValueError or OSError where the
    artifact cannot be read.
    """
    use_threads(settings.threads)
    directory = promoted.directory
    artifact = read_artifact(directory)
    max_length = _max_length(directory)
    encoder = TokenizerEncoder(
        load_tokenizer(directory).backend_tokenizer.to_str(), max_length=max_length
    )
    engine = build_engine(directory, settings)
    try:
        check_golden(directory, heads=artifact.heads, encoder=encoder, engine=engine)
        warm_up(engine, batch_tokens=settings.batch_tokens, max_length=max_length)
    except BaseException:
        engine.close()
        raise
    return ActiveStudent(
        name=promoted.name,
        version=promoted.version,
        model_id=promoted.model_id,
        heads=artifact.heads,
        max_length=max_length,
        encoder=encoder,
        engine=engine,
        calibration=_calibration(directory),
    )


def build_engine(directory: Path, settings: ServingSettings) -> Engine:
    """Return the engine that the settings, the artifact and the machine call for."""
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    classifier = load_classifier(directory, device=str(device), dtype=dtype)
    return TransformersEngine(
        classifier, batch_tokens=settings.batch_tokens, threads=settings.threads
    )


def choose_device(name: str) -> torch.device:
    """Return the named device; `auto` is the accelerator where there is one."""
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(choice: ServingDtype, device: torch.device) -> torch.dtype:
    """Return the type to compute in; `auto` is bfloat16 where the hardware multiplies it."""
    if choice is not ServingDtype.AUTO:
        return torch.float32 if choice is ServingDtype.FLOAT32 else torch.bfloat16
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return torch.bfloat16 if processor_has_bf16() else torch.float32


def processor_has_bf16() -> bool:
    """Say whether the processor has AVX512_BF16 or AMX; without them bf16 is slower than float32."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return False
    flags = cpuinfo.read_text()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _max_length(directory: Path) -> int:
    """Return how many tokens a text of training had at most."""
    for name in ("heads.json", "manifest.json"):
        length = _json(directory / name).get("max_length")
        if isinstance(length, int) and length > 0:
            return length
    positions = _json(directory / "config.json").get("max_position_embeddings")
    return min(DEFAULT_MAX_LENGTH, positions) if isinstance(positions, int) else DEFAULT_MAX_LENGTH


def _calibration(directory: Path) -> Calibration:
    heads = _json(directory / "heads.json").get("heads", [])
    return Calibration(
        temperature={h["name"]: float(h["temperature"]) for h in heads if h.get("temperature")},
        thresholds={h["name"]: h["thresholds"] for h in heads if h.get("thresholds")},
    )


def _json(path: Path) -> dict[str, Any]:
    value = json.loads(path.read_bytes()) if path.exists() else {}
    assert isinstance(value, dict), f"{path} holds no JSON object"
    return value
