"""Golden texts: answers recorded when a student was exported, which it must reproduce when it is loaded."""

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

# With Qwen3-0.6B shapes and random weights, probabilities differed from float32 by at most 0.046 in bf16
# and 0.17 in int8. Wrong weights or a wrong tokenizer shift those of most texts by 0.5 and more.
MAX_MEAN_SHIFT = 0.1
MAX_SHIFT = 0.4


def check_golden(directory: Path, *, heads: list[Head], encoder: Encoder, engine: Engine) -> None:
    """Raise StudentRefused if the engine's answers to the golden texts differ from the recorded ones."""
    golden = _read(directory)
    if golden is None or not golden.texts:
        log.warning("no_golden_texts", artifact=str(directory))
        return
    encoded = encoder.encode(golden.inputs(), truncate=True)
    answers = engine.run([text.tokens for text in encoded])
    for head in heads:
        recorded = _recorded(golden, head)
        shift = _shift(head, recorded, answers[head.name])
        # Not >, so that NaN is refused too.
        if not (shift.mean() <= MAX_MEAN_SHIFT and shift.max() <= MAX_SHIFT):
            raise StudentRefused(
                f"The head {head.name!r} answers the golden texts differently than at export: "
                f"probabilities shifted by {shift.mean():.3f} on average and {shift.max():.3f} at most "
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
        raise StudentRefused(f"{GOLDEN} was recorded for another version of the head {head.name!r}")
    return np.asarray(rows, np.float32)


def _shift(head: Head, recorded: FloatArray, actual: FloatArray) -> FloatArray:
    """Return the shift [N] of each text's probabilities, between 0 and 1."""
    difference = np.abs(probabilities(head.type, recorded) - probabilities(head.type, actual))
    shift: FloatArray = (
        difference.max(axis=-1)
        if head.type is HeadType.MULTI_LABEL
        else difference.sum(axis=-1) / 2
    )
    return shift
