"""The packed engine: the tokens of all texts concatenated, without padding or masks.

Legend: N texts, H hidden size, C labels of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PretrainedConfig

from services.api.serving.engines.encoder_weights import (
    ENCODER_FAMILIES,
    EncoderBackbone,
    encoder_unsupported_reason,
    take_encoder,
)
from services.api.serving.engines.fused_ops import FusedOps
from services.api.serving.engines.packed_batch import PackedBatch, pack
from services.api.serving.engines.packed_decoder import decode
from services.api.serving.engines.packed_encoder import encode
from services.api.serving.engines.packed_weights import (
    DECODER_FAMILIES,
    Backbone,
    Heads,
    decoder_unsupported_reason,
    take_decoder,
)
from services.api.serving.engines.torch_threads import use_threads
from services.api.serving.prediction import FloatArray
from services.shared.model.classifier import Classifier


class PackedEngine:
    """Runs a backbone and its heads over packed texts."""

    def __init__(
        self,
        backbone: Backbone | EncoderBackbone,
        heads: Heads,
        *,
        ops: FusedOps | None = None,
        kind: str | None = None,
    ) -> None:
        self._backbone: Backbone | EncoderBackbone | None = backbone
        self._heads: Heads = heads
        self._ops = ops or FusedOps()
        dtype = str(backbone.dtype).removeprefix("torch.")
        self.kind = kind or f"packed-{dtype}"

    def run(self, texts: Sequence[Sequence[int]], *, threads: int = 1) -> dict[str, FloatArray]:
        """Return the logits [N, C] of each head for N non-empty token lists."""
        use_threads(threads)
        batch = pack(texts)
        with torch.inference_mode():
            states = self._states(batch)  # [N, H]
            return {
                name: _unpack(F.linear(states, weight, bias), batch.order)
                for name, (weight, bias) in self._heads.items()
            }

    @property
    def backbone(self) -> Backbone | EncoderBackbone:
        """Return the weights. The engine must not be closed."""
        assert self._backbone is not None, "the engine is closed"
        return self._backbone

    @property
    def runs_on_cpu(self) -> bool:
        """Return whether the weights are in host memory."""
        return self.backbone.device.type == "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the states and of the heads' weights."""
        return self.backbone.dtype

    def shares_weights_with(self, other: PackedEngine) -> bool:
        """Return whether both engines run the same backbone."""
        return self._backbone is not None and self._backbone is other._backbone

    def with_heads(self, heads: Heads) -> PackedEngine:
        """Return an engine with other heads on the same backbone; either may be closed first."""
        return PackedEngine(self.backbone, heads, ops=self._ops, kind=self.kind)

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        """Return how many tokens a batch of texts of these lengths computes: there is no padding."""
        return sum(lengths)

    def close(self) -> None:
        """Release the weights."""
        self._backbone = None
        self._heads = {}

    def _states(self, batch: PackedBatch) -> Tensor:
        backbone = self.backbone
        if isinstance(backbone, EncoderBackbone):
            return encode(backbone, batch)
        return decode(backbone, batch, self._ops)


def unsupported_reason(config: PretrainedConfig, *, max_length: int) -> str | None:
    """Return why the packed engine cannot run a backbone, None if it can."""
    if config.model_type in ENCODER_FAMILIES:
        return encoder_unsupported_reason(config, max_length=max_length)
    if config.model_type in DECODER_FAMILIES:
        return decoder_unsupported_reason(config, max_length=max_length)
    families = ", ".join(sorted(DECODER_FAMILIES | ENCODER_FAMILIES))
    return f"{config.model_type} is not one of {families}"


def take_backbone(classifier: Classifier, *, max_length: int) -> Backbone | EncoderBackbone:
    """Convert the backbone of a supported classifier, which is consumed."""
    if classifier.config.model_type in ENCODER_FAMILIES:
        return take_encoder(classifier, max_length=max_length)
    return take_decoder(classifier, max_length=max_length)


def _unpack(packed: Tensor, order: list[int]) -> FloatArray:
    values: FloatArray = packed.float().cpu().numpy()
    logits = np.empty_like(values)
    logits[order] = values
    return logits
