"""LitServe with its usual dynamic batching: up to 32 requests, padded to the longest."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import litserve
import torch

from services.shared.model.artifact import load_classifier
from services.shared.model.tokens import load_tokenizer


class Classify(litserve.LitAPI):  # type: ignore[misc]
    def setup(self, device: str) -> None:
        torch.set_num_threads(int(os.environ["BENCH_THREADS"]))
        self.classifier = load_classifier(
            sys.argv[1], dtype=getattr(torch, os.environ["BENCH_DTYPE"])
        )
        self.tokenizer = load_tokenizer(sys.argv[1])

    # LitServe builds its route from the annotation of `request`: `Request` or none means a JSON body.
    def decode_request(self, request) -> str:  # type: ignore[no-untyped-def]
        return str(request["inputs"])

    def predict(self, texts: Sequence[str]) -> list[dict[str, list[float]]]:
        padded = self.tokenizer(list(texts), padding=True, return_tensors="pt")
        with torch.inference_mode():
            answers = self.classifier(padded["input_ids"], padded["attention_mask"])
        return [
            {head: values[row].tolist() for head, values in answers.items()}
            for row in range(len(texts))
        ]

    def encode_response(self, output: dict[str, list[float]]) -> dict[str, list[float]]:
        return output


if __name__ == "__main__":
    api = Classify(max_batch_size=32, batch_timeout=0.05)
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=600)
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)
