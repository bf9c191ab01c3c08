"""BentoML with its adaptive batching: up to 32 texts, padded to the longest."""

from __future__ import annotations

import os

import bentoml
import torch

from services.shared.model.artifact import load_classifier
from services.shared.model.tokens import load_tokenizer


@bentoml.service(workers=1, traffic={"timeout": 600})
class Model:
    def __init__(self) -> None:
        torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
        directory = os.environ["BENCH_ARTIFACT"]
        self.classifier = load_classifier(
            directory, dtype=getattr(torch, os.environ["BENCH_DTYPE"])
        )
        self.tokenizer = load_tokenizer(directory)

    @bentoml.api(batchable=True, max_batch_size=32, max_latency_ms=600_000)  # type: ignore[untyped-decorator]
    def classify(self, inputs: list[str]) -> list[dict[str, list[float]]]:
        padded = self.tokenizer(list(inputs), padding=True, return_tensors="pt")
        with torch.inference_mode():
            answers = self.classifier(padded["input_ids"], padded["attention_mask"])
        return [
            {head: values[row].tolist() for head, values in answers.items()}
            for row in range(len(inputs))
        ]


@bentoml.service(workers=1, traffic={"timeout": 600})
class Front:
    model = bentoml.depends(Model)

    @bentoml.api(route="/predict")  # type: ignore[untyped-decorator]
    async def predict(self, inputs: str) -> dict[str, list[float]]:
        answer: dict[str, list[float]]
        [answer] = await self.model.to_async.classify([inputs])
        return answer
