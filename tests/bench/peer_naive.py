"""The obvious server: FastAPI, one forward pass per request, in its thread pool."""

from __future__ import annotations

import os
import sys

import torch
import uvicorn
from fastapi import Body, FastAPI

from services.shared.model.artifact import load_classifier
from services.shared.model.tokens import load_tokenizer

directory, port = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
classifier = load_classifier(directory, dtype=getattr(torch, os.environ["BENCH_DTYPE"]))
tokenizer = load_tokenizer(directory)
app = FastAPI()


@app.post("/predict")
def predict(body: dict[str, str] = Body()) -> dict[str, list[float]]:
    torch.set_num_threads(1)
    ids = torch.tensor([tokenizer(body["inputs"])["input_ids"]])
    with torch.inference_mode():
        return {head: values[0].tolist() for head, values in classifier(ids).items()}


uvicorn.run(app, host="127.0.0.1", port=port, log_level="warning")
