"""Golden texts: what a student answered when it was exported, and must still answer when it serves.

`golden.json` in the artifact: {"texts": [...], "logits": {head: [[...] a text]}}, in float32. Torch-free.
"""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from services.api.serving.encoder import Encoder
from services.api.serving.engine import Engine
from services.api.serving.prediction import probabilities
from services.api.serving.promoted import StudentRefused
from services.shared.datasets.card import Head

log = logging.getLogger(__name__)

# With Qwen3-0.6B shapes and random weights, bf16 moved a probability by at most 0.046 and int8 by at
# most 0.17 from float32, and either changed at most 3 % of decisions. Weights of another model, or
# a tokenizer that does not belong, move the mean by 0.1 and more.
MAX_MEAN_SHIFT = 0.05
MIN_AGREEMENT = 0.9


class Golden(BaseModel):
    """The recorded texts and logits."""

    model_config = ConfigDict(frozen=True)

    texts: list[str]
    logits: dict[str, list[list[float]]]


def read_golden(directory: Path) -> Golden | None:
    """Return what was recorded with an artifact; None where nothing was. Raises StudentRefused."""
    path = directory / "golden.json"
    if not path.exists():
        return None
    try:
        return Golden.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise StudentRefused(f"golden.json cannot be read: {error}") from error


def check_golden(directory: Path, *, heads: list[Head], encoder: Encoder, engine: Engine) -> None:
    """Let the engine answer the golden texts. Raises StudentRefused where it answers otherwise."""
    golden = read_golden(directory)
    if golden is None or not golden.texts:
        log.warning("no golden texts beside the artifact; it serves unchecked: %s", directory)
        return
    encoded = encoder.encode(golden.texts, truncate=True)
    answers = engine.run([text.tokens for text in encoded])
    for head in heads:
        if head.name not in golden.logits:
            raise StudentRefused(f"golden.json has no logits for the head {head.name!r}")
        recorded = np.asarray(golden.logits[head.name], np.float32)
        given = answers[head.name]
        if recorded.shape != given.shape:
            raise StudentRefused(
                f"golden.json has logits of shape {recorded.shape} for the head {head.name!r}; "
                f"the student answers {given.shape}"
            )
        expected, actual = probabilities(head.type, recorded), probabilities(head.type, given)
        shift = float(np.abs(expected - actual).mean())
        agreement = float((recorded.argmax(-1) == given.argmax(-1)).mean())
        # Not >, so that NaN is refused too.
        if not shift <= MAX_MEAN_SHIFT or agreement < MIN_AGREEMENT:
            raise StudentRefused(
                f"The head {head.name!r} does not answer the golden texts as it did at export: "
                f"probabilities moved by {shift:.3f} on average (at most {MAX_MEAN_SHIFT}), "
                f"{agreement:.0%} of decisions are the same (at least {MIN_AGREEMENT:.0%})."
            )
