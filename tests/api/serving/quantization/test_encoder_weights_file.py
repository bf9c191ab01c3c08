"""Encoders in 8 bits, written and loaded again, compared with their own float32, by family."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from services.api.serving.engines.packed_engine import PackedEngine
from services.api.serving.engines.packed_weights import take_heads
from services.api.serving.quantization.int8_linear import Int8Ops
from services.api.serving.quantization.weights_file import load_int8_backbone, save_int8_weights
from tests.api.serving.engines.test_packed_engine import (
    FAMILIES,
    HEADS,
    MAX_LENGTH,
    classifier_of,
    is_encoder,
    packed,
    texts_of,
)


@pytest.mark.parametrize("name", [name for name in FAMILIES if is_encoder(name)])
def test_an_encoder_in_8_bits_decides_like_itself_in_float32(name: str, tmp_path: Path) -> None:
    texts = texts_of(np.random.default_rng(8).integers(1, MAX_LENGTH + 1, 200).tolist(), seed=9)
    expected = packed(classifier_of(name)).run(texts)
    classifier = classifier_of(name)
    heads = take_heads(classifier)
    (tmp_path / "prepared").mkdir()
    save_int8_weights(classifier, tmp_path, max_length=MAX_LENGTH)
    backbone = load_int8_backbone(
        tmp_path, max_length=MAX_LENGTH, dtype=torch.float32, ops=Int8Ops()
    )
    found = PackedEngine(backbone, heads).run(texts)
    for head in HEADS:
        same = expected[head.name].argmax(-1) == found[head.name].argmax(-1)
        assert same.mean() >= 0.9
        error = np.abs(expected[head.name] - found[head.name]).mean()
        assert 0 < error < 0.15 * expected[head.name].std()
