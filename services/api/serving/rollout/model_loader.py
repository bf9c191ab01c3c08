"""From a promoted artifact to a student that is loaded, checked and warm. The one door to torch."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence

import structlog
import torch

from services.api.serving.active_models import ActiveStudent
from services.api.serving.encoder import TokenizerEncoder
from services.api.serving.engines.dtype import DEFAULT_MAX_LENGTH, choose_device, choose_dtype
from services.api.serving.engines.engine import Engine, warm_up
from services.api.serving.engines.fused_ops import Pieces, compiled_pieces
from services.api.serving.engines.malloc import return_memory
from services.api.serving.engines.packed_engine import PackedEngine
from services.api.serving.engines.packed_weights import Heads, take_backbone, take_heads, why_not
from services.api.serving.engines.padded_engine import TransformersEngine
from services.api.serving.engines.torch_threads import use_threads
from services.api.serving.prediction import Calibration
from services.api.serving.promotion import Promoted
from services.api.serving.quantization.int8_linear import (
    Conversions,
    compiled_conversions,
    largest_activation,
    processor_has_int8,
)
from services.api.serving.quantization.record import prepared_weights, read_prepared
from services.api.serving.quantization.weights_file import load_backbone
from services.api.serving.rollout.golden_check import check_golden
from services.api.serving.settings import EngineChoice, ServingSettings
from services.shared.files.hashing import file_sha256
from services.shared.jobs.artifact_layout import GOLDEN, HEADS_FILE, HEADS_WEIGHTS
from services.shared.model.artifact import (
    Artifact,
    load_classifier,
    read_artifact,
    read_heads,
    verify_artifact,
)
from services.shared.model.tokens import load_tokenizer

log = structlog.get_logger(__name__)

INT8 = "packed-int8"


def load_student(
    promoted: Promoted, settings: ServingSettings, *, serving: Sequence[ActiveStudent] = ()
) -> ActiveStudent:
    """Load, check and warm the promoted student, over the weights of one that serves where it can.

    Raises StudentRefused where it does not answer its golden texts, ValueError or OSError where the
    artifact cannot be read.
    """
    use_threads(settings.threads)
    directory = promoted.directory
    artifact = read_artifact(directory)
    verify_artifact(artifact)
    max_length = artifact.max_length or DEFAULT_MAX_LENGTH
    encoder = TokenizerEncoder(
        load_tokenizer(directory).backend_tokenizer.to_str(), max_length=max_length
    )
    engine = build_engine(artifact, settings, serving=serving)
    return_memory()  # what the engine was made of
    try:
        check_golden(directory, heads=artifact.heads, encoder=encoder, engine=engine)
        warm_up(
            engine,
            batch_tokens=settings.batch_tokens,
            max_length=max_length,
            threads=settings.threads,
        )
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
        calibration=Calibration(
            {name: fitted.temperature for name, fitted in artifact.calibration.items()},
            {name: fitted.thresholds for name, fitted in artifact.calibration.items()},
        ),
        backbone=backbone_hash(artifact),
    )


def backbone_hash(artifact: Artifact) -> str:
    """Return one hash of everything in a sealed artifact that another set of heads would share."""
    assert artifact.manifest is not None, "verified artifacts are sealed"
    own = {HEADS_FILE, HEADS_WEIGHTS, GOLDEN}
    shared = {name: sha for name, sha in artifact.manifest.files.items() if name not in own}
    text = json.dumps([artifact.max_length, sorted(shared.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def _engine_over(artifact: Artifact, serving: Sequence[ActiveStudent]) -> PackedEngine | None:
    """Return an engine over the backbone of a student that serves; None where none has the same."""
    backbone = backbone_hash(artifact)
    for student in serving:
        engine = student.engine
        if student.backbone != backbone or not isinstance(engine, PackedEngine):
            continue
        # An 8-bit backbone passed its gate with its own heads, and with no others.
        if engine.kind != INT8 and student.hold():
            try:
                return engine.with_heads(_read_heads(artifact, engine.dtype))
            finally:
                student.release()
    return None


def build_engine(
    artifact: Artifact, settings: ServingSettings, *, serving: Sequence[ActiveStudent] = ()
) -> Engine:
    """Return the engine that the settings, the artifact and the machine call for.

    It shares the weights of a student that serves, where only the heads differ.

    Raises ValueError where the settings name an engine that cannot run this student.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    if settings.engine in (EngineChoice.AUTO, EngineChoice.PACKED_INT8):
        obstacle = why_not_int8(artifact, device)
        if obstacle is None:
            return _int8_engine(artifact, settings, dtype)
        if settings.engine is EngineChoice.PACKED_INT8:
            raise ValueError(f"{artifact.directory} cannot be served in 8 bits: {obstacle}")
        log.info("not_in_8_bits", artifact=str(artifact.directory), why=obstacle)
    if settings.engine is not EngineChoice.TRANSFORMERS:
        shared = _engine_over(artifact, serving)
        if shared is not None:
            return shared
    classifier = load_classifier(artifact.directory, device=device, dtype=dtype)
    max_length = artifact.max_length or DEFAULT_MAX_LENGTH
    obstacle = why_not(classifier.config, max_length=max_length)
    if settings.engine is EngineChoice.TRANSFORMERS or (
        obstacle and settings.engine is EngineChoice.AUTO
    ):
        return TransformersEngine(classifier, batch_tokens=settings.batch_tokens)
    if obstacle:
        raise ValueError(f"the engine {settings.engine} cannot run this backbone: {obstacle}")
    heads = take_heads(classifier)
    backbone = take_backbone(classifier, max_length=max_length)
    return PackedEngine(backbone, heads)


def why_not_int8(artifact: Artifact, device: torch.device) -> str | None:
    """Say why an artifact may not be served in 8 bits here; None where it may."""
    if device.type != "cpu" or not processor_has_int8():
        return "the 8-bit engine runs on processors with oneDNN alone"
    prepared = read_prepared(artifact.directory)
    if prepared is None:
        return "it was not prepared (python -m services.api.serving.quantization.quantize)"
    if not prepared.passed:
        failed = [name for name, head in prepared.heads.items() if not head.passed]
        return f"it lost too much on {', '.join(failed)} when it was prepared"
    if prepared.largest_activation != largest_activation():
        return "it was compared on a processor that computes 8-bit products otherwise"
    if file_sha256(prepared_weights(artifact.directory)) != prepared.weights_sha256:
        return "the prepared weights are not those that passed"
    return None


def _int8_engine(artifact: Artifact, settings: ServingSettings, dtype: torch.dtype) -> Engine:
    compiles = settings.compile and shutil.which("g++") is not None
    backbone = load_backbone(
        artifact.directory,
        max_length=artifact.max_length or DEFAULT_MAX_LENGTH,
        dtype=dtype,
        conversions=compiled_conversions() if compiles else Conversions(),
    )
    return PackedEngine(
        backbone,
        _read_heads(artifact, dtype),
        pieces=compiled_pieces() if compiles else Pieces(),
        kind=INT8,
    )


def _read_heads(artifact: Artifact, dtype: torch.dtype) -> Heads:
    weights = read_heads(artifact.directory, artifact.heads)
    return {
        head.name: (
            weights[f"{head.name}.weight"].to(dtype),
            weights[f"{head.name}.bias"].to(dtype),
        )
        for head in artifact.heads
    }
