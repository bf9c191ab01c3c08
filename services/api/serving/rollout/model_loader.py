"""Loads, checks and warms up a promoted artifact. The only module of serving imported to load torch."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence

import structlog
import torch

from services.api.serving.active_models import ActiveModel
from services.api.serving.encoder import DEFAULT_MAX_LENGTH, TokenizerEncoder
from services.api.serving.engines.dtype import choose_device, choose_dtype
from services.api.serving.engines.engine import Engine, warm_up
from services.api.serving.engines.fused_ops import FusedOps, compiled_ops
from services.api.serving.engines.malloc import collect_and_trim
from services.api.serving.engines.packed_engine import (
    PackedEngine,
    take_backbone,
    unsupported_reason,
)
from services.api.serving.engines.packed_weights import Heads, take_heads
from services.api.serving.engines.padded_engine import PaddedEngine
from services.api.serving.engines.torch_threads import use_threads
from services.api.serving.prediction import Calibration
from services.api.serving.promotion import Promotion
from services.api.serving.quantization.int8_linear import (
    Int8Ops,
    activation_limit,
    compiled_int8_ops,
    cpu_supports_int8,
)
from services.api.serving.quantization.record import (
    INT8_KIND,
    int8_weights_path,
    read_quantization_record,
)
from services.api.serving.quantization.weights_file import load_int8_backbone
from services.api.serving.rollout.golden_check import check_golden
from services.api.serving.settings import EngineChoice, ServingSettings
from services.shared.datasets.text import with_prefix
from services.shared.files.hashing import file_sha256
from services.shared.jobs.artifact_layout import GOLDEN, HEADS_FILE, HEADS_WEIGHTS
from services.shared.model.artifact import (
    Artifact,
    load_classifier,
    read_artifact,
    read_heads,
    verify_artifact,
)
from services.shared.model.description import MODEL_CARD
from services.shared.model.text_encoding import marks_types, tokenizer_input
from services.shared.model.tokens import load_tokenizer

log = structlog.get_logger(__name__)


def load_student(
    promotion: Promotion, settings: ServingSettings, *, serving: Sequence[ActiveModel] = ()
) -> ActiveModel:
    """Load, check and warm up a promoted student, sharing the backbone of a `serving` one if possible.

    Raises StudentRefused if it answers its golden texts differently, ValueError or OSError if the
    artifact cannot be read.
    """
    use_threads(settings.threads)
    directory = promotion.directory
    artifact = read_artifact(directory)
    verify_artifact(artifact)
    max_length = artifact.max_length or DEFAULT_MAX_LENGTH
    tokenizer = load_tokenizer(directory, artifact.text_kind)
    encoder = TokenizerEncoder(
        tokenizer.backend_tokenizer.to_str(),
        max_length=max_length,
        kind=artifact.text_kind,
        convert=lambda text: tokenizer_input(with_prefix(text, artifact.prefix), tokenizer),
        marks_types=marks_types(tokenizer),
    )
    engine = build_engine(artifact, settings, serving=serving)
    collect_and_trim()  # returns what the engine was made from
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
    return ActiveModel(
        name=promotion.name,
        version=promotion.version,
        model_id=promotion.model_id,
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


def build_engine(
    artifact: Artifact, settings: ServingSettings, *, serving: Sequence[ActiveModel] = ()
) -> Engine:
    """Return the engine chosen by the settings, the artifact and the machine.

    It shares the backbone of a `serving` student if only the heads differ. Raises ValueError if the
    settings name an engine that cannot run this student.
    """
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    if settings.engine in (EngineChoice.AUTO, EngineChoice.PACKED_INT8):
        reason = int8_unsupported_reason(artifact, device)
        if reason is None:
            return _int8_engine(artifact, settings, dtype)
        if settings.engine is EngineChoice.PACKED_INT8:
            raise ValueError(f"{artifact.directory} cannot be served in 8 bits: {reason}")
        log.info("int8_not_used", artifact=str(artifact.directory), reason=reason)
    if settings.engine is not EngineChoice.TRANSFORMERS:
        shared = _shared_engine(artifact, serving)
        if shared is not None:
            return shared
    classifier = load_classifier(artifact.directory, device=device, dtype=dtype)
    max_length = artifact.max_length or DEFAULT_MAX_LENGTH
    reason = unsupported_reason(classifier.config, max_length=max_length)
    if settings.engine is EngineChoice.TRANSFORMERS or (
        reason and settings.engine is EngineChoice.AUTO
    ):
        log.info("packed_not_used", artifact=str(artifact.directory), reason=reason or "settings")
        return PaddedEngine(classifier, batch_tokens=settings.batch_tokens)
    if reason:
        raise ValueError(f"the engine {settings.engine} cannot run this backbone: {reason}")
    heads = take_heads(classifier)
    backbone = take_backbone(classifier, max_length=max_length)
    return PackedEngine(backbone, heads)


def int8_unsupported_reason(artifact: Artifact, device: torch.device) -> str | None:
    """Return why an artifact may not be served in 8 bits on this machine, None if it may."""
    if device.type != "cpu" or not cpu_supports_int8():
        return "the int8 engine runs on CPUs with oneDNN only"
    record = read_quantization_record(artifact.directory)
    if record is None:
        return "it is not quantized (python -m services.api.serving.quantization.quantize)"
    if not record.passed:
        failed = [name for name, head in record.heads.items() if not head.passed]
        return f"quantization lost too much on {', '.join(failed)}"
    if record.largest_activation != activation_limit():
        return "it was compared on a CPU that computes 8-bit products differently"
    if file_sha256(int8_weights_path(artifact.directory)) != record.weights_sha256:
        return "the int8 weights are not those that passed"
    return None


def backbone_hash(artifact: Artifact) -> str:
    """Return a hash of everything in a sealed artifact that does not depend on its heads."""
    assert artifact.manifest is not None, "verified artifacts are sealed"
    head_files = {HEADS_FILE, HEADS_WEIGHTS, GOLDEN, MODEL_CARD}
    shared = {name: sha for name, sha in artifact.manifest.files.items() if name not in head_files}
    text = json.dumps([artifact.max_length, artifact.pooling, sorted(shared.items())])
    return hashlib.sha256(text.encode()).hexdigest()


def _shared_engine(artifact: Artifact, serving: Sequence[ActiveModel]) -> PackedEngine | None:
    """Return an engine on the backbone of a serving student, None if none has the same backbone."""
    backbone = backbone_hash(artifact)
    for model in serving:
        engine = model.engine
        if model.backbone != backbone or not isinstance(engine, PackedEngine):
            continue
        # An int8 backbone passed its gate with its own heads only.
        if engine.kind != INT8_KIND and model.acquire():
            try:
                return engine.with_heads(_load_heads(artifact, engine.dtype))
            finally:
                model.release()
    return None


def _int8_engine(artifact: Artifact, settings: ServingSettings, dtype: torch.dtype) -> Engine:
    compiles = settings.compile and shutil.which("g++") is not None
    backbone = load_int8_backbone(
        artifact.directory,
        max_length=artifact.max_length or DEFAULT_MAX_LENGTH,
        dtype=dtype,
        ops=compiled_int8_ops() if compiles else Int8Ops(),
    )
    return PackedEngine(
        backbone,
        _load_heads(artifact, dtype),
        ops=compiled_ops() if compiles else FusedOps(),
        kind=INT8_KIND,
    )


def _load_heads(artifact: Artifact, dtype: torch.dtype) -> Heads:
    weights = read_heads(artifact.directory, artifact.heads)
    return {
        head.name: (
            weights[f"{head.name}.weight"].to(dtype),
            weights[f"{head.name}.bias"].to(dtype),
        )
        for head in artifact.heads
    }
