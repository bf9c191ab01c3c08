"""The engines alone: processor seconds with one thread, in rounds that take turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from synthetic import MAX_LENGTH, make_texts

from services.api.serving.gate import prepared_weights
from services.api.serving.int8 import Conversions, Int8Linear, compiled_conversions
from services.api.serving.layout import Backbone, take_backbone, take_heads
from services.api.serving.packed import PackedEngine
from services.api.serving.pieces import Pieces, compiled_pieces
from services.api.serving.prepared import load_backbone, save_weights
from services.api.serving.smoothing import largest_activations, smooth
from services.shared.model.artifact import load_classifier
from services.shared.model.tokens import encode, load_tokenizer

BATCH_TOKENS = 512
Run = Callable[[], Any]


def bench_engines(artifact: Path, *, texts: int, rounds: int) -> dict[str, Any]:
    """Return tokens per processor second of each engine and of the products alone, and agreement."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(artifact)
    tokens, _ = encode(make_texts(texts), tokenizer, max_length=MAX_LENGTH)
    plain = load_classifier(artifact, dtype=torch.bfloat16)
    bf16 = _packed(artifact, torch.bfloat16)
    _prepare(artifact, tokens[:16])
    int8 = _int8(artifact, plain, compiles=True)
    int8_eager = _int8(artifact, plain, compiles=False)

    candidates: dict[str, Run] = {
        "transformers bf16, one by one": lambda: _one_by_one(plain, tokens),
        "packed bf16": lambda: _batched(bf16, tokens),
        "packed int8": lambda: _batched(int8, tokens),
        "packed int8, not compiled": lambda: _batched(int8_eager, tokens),
    }
    limits: dict[str, Run] = {
        "bf16 products alone": lambda: _products(bf16),
        "int8 products alone": lambda: _products(int8_eager),
    }
    answers = {name: run() for name, run in candidates.items()}
    for run in limits.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in [*candidates, *limits]}
    for _ in range(rounds):
        for name, run in {**candidates, **limits}.items():
            started = time.process_time()
            run()
            seconds[name].append(time.process_time() - started)
    total = sum(map(len, tokens))
    rates = {name: total / min(seconds[name]) for name in candidates}
    rates |= {name: BATCH_TOKENS / min(seconds[name]) for name in limits}
    exact = answers["transformers bf16, one by one"]
    return {
        "texts": texts,
        "tokens": total,
        "tokens_per_cpu_second": rates,
        "seconds": seconds,
        "agreement_with_transformers_bf16": {
            name: _agreement(exact, found) for name, found in answers.items()
        },
    }


def _packed(artifact: Path, dtype: torch.dtype) -> PackedEngine:
    classifier = load_classifier(artifact, dtype=dtype)
    heads = take_heads(classifier)
    return PackedEngine(take_backbone(classifier, max_length=MAX_LENGTH), heads, threads=1)


def _prepare(artifact: Path, calibration: Sequence[Sequence[int]]) -> None:
    if prepared_weights(artifact).exists():
        return
    classifier = load_classifier(artifact, dtype=torch.float32)
    smooth(classifier, largest_activations(classifier, calibration))
    save_weights(classifier, artifact)


def _int8(artifact: Path, plain: Any, *, compiles: bool) -> PackedEngine:
    backbone = load_backbone(
        artifact,
        max_length=MAX_LENGTH,
        dtype=torch.bfloat16,
        conversions=compiled_conversions() if compiles else Conversions(),
    )
    pieces = compiled_pieces() if compiles else Pieces()
    return PackedEngine(backbone, take_heads(plain), threads=1, pieces=pieces, kind="packed-int8")


def _batches(tokens: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    batch: list[int] = []
    size = 0
    for index in sorted(range(len(tokens)), key=lambda i: len(tokens[i])):
        if batch and size + len(tokens[index]) > BATCH_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(index)
        size += len(tokens[index])
    if batch:
        yield batch


def _batched(engine: PackedEngine, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    answers: dict[str, Any] = {}
    for batch in _batches(tokens):
        for head, values in engine.run([tokens[index] for index in batch]).items():
            answers.setdefault(head, np.empty((len(tokens), values.shape[1])))[batch] = values
    return answers


@torch.inference_mode()
def _one_by_one(classifier: Any, tokens: Sequence[Sequence[int]]) -> dict[str, Any]:
    answers = [classifier(torch.tensor([list(text)])) for text in tokens]
    return {head: torch.cat([a[head] for a in answers]).numpy() for head in answers[0]}


@torch.inference_mode()
def _products(engine: PackedEngine) -> None:
    """Every matrix product of one batch of tokens and nothing else, each with its own weights."""
    backbone = engine._backbone
    assert isinstance(backbone, Backbone)
    width, inner = backbone.embedding.shape[1], backbone.shape.num_heads * backbone.shape.head_dim
    x = torch.ones(BATCH_TOKENS, width, dtype=torch.bfloat16)
    mixed = torch.ones(BATCH_TOKENS, inner, dtype=torch.bfloat16)
    gated = torch.ones(BATCH_TOKENS, 3 * width, dtype=torch.bfloat16)
    for layer in backbone.layers:
        products = [(layer.query_key_value, x), (layer.output, mixed)]
        products += [(layer.gate_up, x), (layer.down, gated)]
        if layer.query is not None:
            products.append((layer.query, x))
        for linear, given in products:
            if isinstance(linear, Int8Linear):
                linear.multiply(given.to(torch.uint8))
            else:
                linear(given)


def _agreement(exact: Mapping[str, Any], found: Mapping[str, Any]) -> float:
    return float(np.mean([np.mean(exact[h].argmax(-1) == found[h].argmax(-1)) for h in exact]))
