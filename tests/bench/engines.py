"""The engines alone: CPU seconds with one thread, in interleaved rounds.

ONNX Runtime in 8 bits runs in a process of the peers' environment, on batches in the buckets of our padded
engine (at most 15 % padding); its seconds are those of its process.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypedDict

import numpy as np
import torch

from services.api.serving.engines.fused_ops import FusedOps, compiled_ops
from services.api.serving.engines.packed_engine import PackedEngine, take_backbone
from services.api.serving.engines.packed_weights import Backbone, take_heads
from services.api.serving.engines.padded_engine import length_buckets
from services.api.serving.prediction import FloatArray
from services.api.serving.quantization.int8_linear import (
    Int8Linear,
    Int8Ops,
    compiled_int8_ops,
)
from services.api.serving.quantization.record import int8_weights_path
from services.api.serving.quantization.smoothquant import activation_maxima, smooth
from services.api.serving.quantization.weights_file import load_int8_backbone, save_int8_weights
from services.shared.model.artifact import load_classifier
from services.shared.model.classifier import Classifier
from services.shared.model.tokens import encode, load_tokenizer
from tests.bench.synthetic import DTYPE, HEADS, MAX_LENGTH, TYPE, make_texts

HERE = Path(__file__).parent
BATCH_TOKENS = 512
PLAIN = f"transformers {TYPE}, one by one"
ONNX = "ONNX Runtime int8"

# The logits [N, C] by head, None where only products are computed.
Logits = Mapping[str, FloatArray]
# Runs once; returns its CPU seconds and the logits.
Run = Callable[[], tuple[float, Logits | None]]


class EnginesResult(TypedDict):
    """The figures of each engine, and of the products alone, by name."""

    texts: int
    tokens: int
    tokens_per_cpu_second: dict[str, float]
    seconds: dict[str, list[float]]
    agreement_with_transformers: dict[str, float]


def bench_engines(
    artifact: Path, *, texts: int, rounds: int, peers_python: Path, onnx_dir: Path
) -> EnginesResult:
    """Return tokens per CPU second of each engine and of the products alone, and the agreement."""
    with subprocess.Popen(
        [str(peers_python), str(HERE / "onnx_int8.py"), "run", str(onnx_dir)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as peer:
        try:
            return _compare(artifact, texts=texts, rounds=rounds, peer=peer)
        finally:
            peer.terminate()


def export_onnx(artifact: Path, directory: Path, *, peers_python: Path) -> None:
    """Write the ONNX form of an artifact in 8 bits, unless it exists already."""
    subprocess.run(
        [str(peers_python), str(HERE / "onnx_int8.py"), "export", str(artifact), str(directory)],
        env=os.environ | {"PYTHONPATH": str(HERE.parent.parent)},
        check=True,
    )


def _compare(
    artifact: Path, *, texts: int, rounds: int, peer: subprocess.Popen[str]
) -> EnginesResult:
    torch.set_num_threads(1)
    tokenizer = load_tokenizer(artifact)
    tokens, _ = encode(make_texts(texts), tokenizer, max_length=MAX_LENGTH, prefix="")
    plain = load_classifier(artifact, dtype=DTYPE)
    packed = _packed(artifact)
    int8 = int8_engine(artifact, plain, compiles=True)
    int8_eager = int8_engine(artifact, plain, compiles=False)

    runs: dict[str, Run] = {
        PLAIN: _timed(lambda: _one_by_one(plain, tokens)),
        f"packed {TYPE}": _timed(lambda: _batched(packed, tokens)),
        "packed int8": _timed(lambda: _batched(int8, tokens)),
        "packed int8, not compiled": _timed(lambda: _batched(int8_eager, tokens)),
        ONNX: lambda: _onnx(peer, tokens),
        f"{TYPE} products alone": _timed(lambda: _products(packed)),
        "int8 products alone": _timed(lambda: _products(int8_eager)),
    }
    first = {name: run()[1] for name, run in runs.items()}  # the warm-up
    answers = {name: logits for name, logits in first.items() if logits is not None}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs) if turn % 2 == 0 else reversed(runs):
            seconds[name].append(runs[name]()[0])
    total = sum(map(len, tokens))
    rates = {
        name: (total if name in answers else BATCH_TOKENS) / median(seconds[name]) for name in runs
    }
    exact = answers[PLAIN]
    return {
        "texts": texts,
        "tokens": total,
        "tokens_per_cpu_second": rates,
        "seconds": seconds,
        "agreement_with_transformers": {
            name: _agreement(exact, found) for name, found in answers.items()
        },
    }


def _timed(run: Callable[[], Logits | None]) -> Run:
    def timed() -> tuple[float, Logits | None]:
        started = time.process_time()
        answer = run()
        return time.process_time() - started, answer

    return timed


def _onnx(peer: subprocess.Popen[str], tokens: Sequence[Sequence[int]]) -> tuple[float, Logits]:
    assert peer.stdin is not None
    assert peer.stdout is not None
    rows = list(length_buckets([len(text) for text in tokens], budget=BATCH_TOKENS))
    peer.stdin.write(json.dumps([[tokens[row] for row in batch] for batch in rows]) + "\n")
    peer.stdin.flush()
    answer = json.loads(peer.stdout.readline())
    logits = np.empty((len(tokens), sum(len(head.labels) for head in HEADS)), np.float32)
    logits[[row for batch in rows for row in batch]] = answer["logits"]
    ends = np.cumsum([len(head.labels) for head in HEADS])[:-1]
    by_head = zip((head.name for head in HEADS), np.split(logits, ends, axis=1), strict=True)
    return answer["seconds"], dict(by_head)


def _packed(artifact: Path) -> PackedEngine:
    classifier = load_classifier(artifact, dtype=DTYPE)
    heads = take_heads(classifier)
    return PackedEngine(take_backbone(classifier, max_length=MAX_LENGTH), heads)


def quantize_student(artifact: Path) -> None:
    """Write the int8 weights into an artifact, unless they exist already."""
    if int8_weights_path(artifact).exists():
        return
    calibration, _ = encode(
        make_texts(16), load_tokenizer(artifact), max_length=MAX_LENGTH, prefix=""
    )
    classifier = load_classifier(artifact, dtype=torch.float32)
    smooth(classifier, activation_maxima(classifier, calibration))
    save_int8_weights(classifier, artifact, max_length=MAX_LENGTH)


def int8_engine(artifact: Path, plain: Classifier, *, compiles: bool) -> PackedEngine:
    """Return the int8 engine, whatever the gate of its weights says."""
    backbone = load_int8_backbone(
        artifact,
        max_length=MAX_LENGTH,
        dtype=DTYPE,
        ops=compiled_int8_ops() if compiles else Int8Ops(),
    )
    ops = compiled_ops() if compiles else FusedOps()
    return PackedEngine(backbone, take_heads(plain), ops=ops, kind="packed-int8")


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


def _batched(engine: PackedEngine, tokens: Sequence[Sequence[int]]) -> Logits:
    answers: dict[str, FloatArray] = {}
    for batch in _batches(tokens):
        for head, values in engine.run([tokens[index] for index in batch]).items():
            answers.setdefault(head, np.empty((len(tokens), values.shape[1]), np.float32))[
                batch
            ] = values
    return answers


@torch.inference_mode()
def _one_by_one(classifier: Classifier, tokens: Sequence[Sequence[int]]) -> Logits:
    answers = [classifier(torch.tensor([list(text)])) for text in tokens]
    return {head: torch.cat([a[head] for a in answers]).numpy() for head in answers[0]}


@torch.inference_mode()
def _products(engine: PackedEngine) -> None:
    """Compute every matrix product of one batch of tokens, and nothing else."""
    backbone = engine.backbone
    assert isinstance(backbone, Backbone)
    width, inner = backbone.embedding.shape[1], backbone.shape.num_heads * backbone.shape.head_dim
    x = torch.ones(BATCH_TOKENS, width, dtype=DTYPE)
    mixed = torch.ones(BATCH_TOKENS, inner, dtype=DTYPE)
    gated = torch.ones(BATCH_TOKENS, 3 * width, dtype=DTYPE)
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


def _agreement(exact: Logits, found: Logits) -> float:
    return float(np.mean([np.mean(exact[h].argmax(-1) == found[h].argmax(-1)) for h in exact]))
