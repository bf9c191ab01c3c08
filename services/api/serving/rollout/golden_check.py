"""Golden texts: what a student answered when it was exported, and must still answer when it serves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import structlog
from pydantic import ValidationError

from services.api.serving.encoder import Encoder
from services.api.serving.engines.engine import Engine
from services.api.serving.prediction import FloatArray, probabilities
from services.api.serving.promotion import StudentRefused
from services.shared.datasets.card import Head, HeadType
from services.shared.jobs.artifact_layout import GOLDEN
from services.shared.model.artifact import Golden

log = structlog.get_logger(__name__)

# With Qwen3-0.6B shapes and random weights, bf16 moved a probability by at most 0.046 and int8 by at
# most 0.17 from float32. Wrong weights or a wrong tokenizer move most texts by half and more.
MAX_MEAN_SHIFT = 0.1
MAX_SHIFT = 0.4


def check_golden(directory: Path, *, heads: list[Head], encoder: Encoder, engine: Engine) -> None:
    """Let the engine answer the golden texts. Raises StudentRefused where it answers otherwise."""
    golden = _read(directory)
    if golden is None or not golden.texts:
        log.warning("no_golden_texts", artifact=str(directory))
        return
    encoded = encoder.encode([entry.text for entry in golden.texts], truncate=True)
    answers = engine.run([text.tokens for text in encoded])
    for head in heads:
        recorded = _recorded(golden, head)
        shift = _shift(head, recorded, answers[head.name])
        # Not >, so that NaN is refused too.
        if not (shift.mean() <= MAX_MEAN_SHIFT and shift.max() <= MAX_SHIFT):
            raise StudentRefused(
                f"The head {head.name!r} does not answer the golden texts as it did at export: "
                f"probabilities moved by {shift.mean():.3f} on average and {shift.max():.3f} at most "
                f"(allowed: {MAX_MEAN_SHIFT} and {MAX_SHIFT})."
            )


def _read(directory: Path) -> Golden | None:
    path = directory / GOLDEN
    if not path.exists():
        return None
    try:
        return Golden.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise StudentRefused(f"{GOLDEN} cannot be read: {error}") from error


def _recorded(golden: Golden, head: Head) -> FloatArray:
    rows = [entry.logits.get(head.name, []) for entry in golden.texts]
    if any(len(row) != len(head.labels) for row in rows):
        raise StudentRefused(f"{GOLDEN} was not recorded for the head {head.name!r} as it is now")
    return np.asarray(rows, np.float32)


def _shift(head: Head, recorded: FloatArray, given: FloatArray) -> FloatArray:
    """Return how far the probabilities of each text moved, [N] between 0 and 1."""
    moved = np.abs(probabilities(head.type, recorded) - probabilities(head.type, given))
    shift: FloatArray = (
        moved.max(axis=-1) if head.type is HeadType.MULTI_LABEL else moved.sum(axis=-1) / 2
    )
    return shift
