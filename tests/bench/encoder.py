"""A real encoder alone: ours, ONNX Runtime and padded transformers, in interleaved rounds with one thread.

    python -m tests.bench.encoder [--texts 40] [--rounds 3] [--json FILE]

multilingual-e5-small with mean pooling and its prefix, heads fitted on its states by ridge regression, on held-out
reviews. The peers batch as Text Embeddings Inference does on a CPU: texts sorted by tokens, as many as a budget of
padded tokens holds, padded to the longest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnxruntime as ort
import torch
from numpy.typing import NDArray
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor

from services.api.serving.engines.packed_engine import PackedEngine, take_backbone
from services.api.serving.engines.packed_weights import take_heads
from services.api.serving.quantization.int8_linear import Int8Ops
from services.api.serving.quantization.record import int8_weights_path
from services.api.serving.quantization.weights_file import load_int8_backbone, save_int8_weights
from services.cli.demo_data import write_reviews
from services.cli.demo_jobs import BASE_MODEL
from services.shared.datasets.card import Head
from services.shared.jobs.text_conventions import read_pooling, read_prefix
from services.shared.model.artifact import load_backbone
from services.shared.model.classifier import Classifier, wrap_backbone
from services.shared.model.tokens import encode, load_tokenizer, pad
from tests.pretrained_models import pretrained_model

MAX_LENGTH = 256
BATCH_TOKENS = 512
SINGLE_TEXTS = 8
FITTED_ON = 96
HEADS = {"sentiment": ["negative", "positive"], "domain": ["book", "computer", "hotel", "other"]}

Logits = dict[str, NDArray[np.float32]]
Run = Callable[[Sequence[Sequence[int]]], Logits]


def main() -> None:
    """Measure every engine and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        result = measure(Path(scratch), texts=options.texts, rounds=options.rounds)
    print(f"{result['texts']} texts, {result['tokens']} tokens, one thread")
    for name, row in result["engines"].items():
        print(f"{name:28}" + "".join(f"{value:>12.4g}" for value in row.values()))
    print(" " * 28 + "".join(f"{name:>12}" for name in row))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))


def measure(scratch: Path, *, texts: int, rounds: int) -> dict[str, Any]:
    """Return the figures of each engine: tokens per CPU second, ratios, latency of single texts, agreement."""
    classifier, tokens = prepare(scratch, texts)
    runs = engines(classifier, scratch)
    exact = runs["transformers"](tokens)  # also the warm-up
    agreement = {name: _agreement(exact, run(tokens)) for name, run in runs.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    single: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs) if turn % 2 == 0 else reversed(runs):
            seconds[name].append(_cpu_seconds(runs[name], tokens))
            single[name] += [_cpu_seconds(runs[name], [text]) for text in tokens[:SINGLE_TEXTS]]
    total = sum(map(len, tokens))
    base = seconds["transformers"]
    return {
        "texts": texts,
        "tokens": total,
        "seconds": seconds,
        "engines": {
            name: {
                "tok/CPU-s": total / median(seconds[name]),
                "ratio": median(b / own for b, own in zip(base, seconds[name], strict=True)),
                "p50 ms": float(np.percentile(single[name], 50)) * 1000,
                "p99 ms": float(np.percentile(single[name], 99)) * 1000,
                "agreement": agreement[name],
            }
            for name in runs
        },
    }


def prepare(scratch: Path, texts: int) -> tuple[Classifier, list[list[int]]]:
    """Return the classifier, its heads fitted, and the tokens of held-out reviews."""
    directory = pretrained_model(BASE_MODEL)
    tokenizer, pooling = load_tokenizer(directory), read_pooling(directory)
    write_reviews(scratch / "reviews.jsonl")
    rows = [json.loads(line) for line in (scratch / "reviews.jsonl").open(encoding="utf-8")]
    np.random.default_rng(0).shuffle(rows)
    rows = rows[: FITTED_ON + texts]
    tokens, _ = encode(
        [row["text"] for row in rows],
        tokenizer,
        max_length=MAX_LENGTH,
        prefix=read_prefix(directory),
    )
    heads = [Head(name=name, labels=labels) for name, labels in HEADS.items()]
    classifier = wrap_backbone(load_backbone(directory), heads, pooling=pooling).eval()
    _fit(classifier, rows[:FITTED_ON], tokens[:FITTED_ON])
    return classifier, tokens[FITTED_ON:]


@torch.inference_mode()
def _fit(classifier: Classifier, rows: Sequence[Any], tokens: Sequence[list[int]]) -> None:
    """Set the heads by ridge regression from the states to the labels."""
    states = []
    for linear in classifier.heads.values():
        linear.register_forward_pre_hook(lambda _, given: states.append(given[0]))
        break
    for text in tokens:
        classifier(*pad([text], 0))
    x = torch.cat(states)  # [N, H]
    mean = x.mean(dim=0)
    centred = x - mean
    gram = centred.T @ centred + 0.1 * torch.eye(x.shape[1])
    for name, labels in HEADS.items():
        target = torch.tensor([[row[name] == label for label in labels] for row in rows]).float()
        weight = torch.linalg.solve(gram, centred.T @ (target - target.mean(dim=0))).T
        head: Any = classifier.heads[name]
        head.weight.copy_(weight)
        head.bias.copy_(target.mean(dim=0) - weight @ mean)


def engines(classifier: Classifier, scratch: Path) -> dict[str, Run]:
    """Return how each engine answers all texts."""
    exported = export_onnx(classifier, scratch)
    runs = {
        "transformers": _padded(lambda batch: _transformers(classifier, batch)),
        "ONNX Runtime float32": _padded(_session(exported / "float32.onnx")),
        "ONNX Runtime int8": _padded(_session(exported / "int8.onnx")),
    }
    (scratch / "prepared").mkdir()
    copy = wrap_backbone(
        load_backbone(pretrained_model(BASE_MODEL)),
        classifier.head_specs,
        pooling=classifier.pooling,
    ).eval()
    save_int8_weights(copy, scratch, max_length=MAX_LENGTH)
    assert int8_weights_path(scratch).exists()
    int8 = load_int8_backbone(scratch, max_length=MAX_LENGTH, dtype=torch.float32, ops=Int8Ops())
    heads = take_heads(classifier)
    again = wrap_backbone(
        load_backbone(pretrained_model(BASE_MODEL)),
        classifier.head_specs,
        pooling=classifier.pooling,
    ).eval()
    packed = PackedEngine(take_backbone(again, max_length=MAX_LENGTH), heads)
    runs["ours, packed float32"] = _ours(packed)
    runs["ours, packed int8"] = _ours(PackedEngine(int8, heads))
    return runs


def export_onnx(classifier: Classifier, directory: Path) -> Path:
    """Write the classifier as ONNX in float32 and, quantized as ONNX Runtime documents it, in 8 bits."""

    class Joined(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.classifier = classifier

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return torch.cat(list(self.classifier(input_ids, attention_mask).values()), dim=-1)

    batch, length = torch.export.Dim("batch", min=1, max=512), torch.export.Dim("length", max=512)
    example = (torch.ones(3, 17, dtype=torch.int64), torch.ones(3, 17, dtype=torch.int64))
    example[1][0, 9:] = 0
    torch.onnx.export(
        Joined().eval(),
        example,
        directory / "float32.onnx",
        input_names=["input_ids", "attention_mask"],
        dynamic_shapes=({0: batch, 1: length}, {0: batch, 1: length}),
        dynamo=True,
        external_data=True,
    )
    quantize_dynamic(
        directory / "float32.onnx",
        directory / "int8.onnx",
        op_types_to_quantize=["MatMul", "Gemm"],
        per_channel=True,
        weight_type=QuantType.QInt8,
        use_external_data_format=True,
    )
    return directory


def _session(file: Path) -> Callable[[Sequence[Sequence[int]]], NDArray[np.float32]]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(str(file), options, ["CPUExecutionProvider"])

    def run(texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
        lengths = np.array([len(text) for text in texts])
        tokens = np.zeros((len(texts), lengths.max()), np.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        mask = (np.arange(lengths.max()) < lengths[:, None]).astype(np.int64)
        (logits,) = session.run(None, {"input_ids": tokens, "attention_mask": mask})
        return np.asarray(logits, np.float32)

    return run


@torch.inference_mode()
def _transformers(classifier: Classifier, texts: Sequence[Sequence[int]]) -> NDArray[np.float32]:
    return torch.cat(list(classifier(*pad([list(t) for t in texts], 0)).values()), dim=-1).numpy()


def _padded(answer: Callable[[Sequence[Sequence[int]]], NDArray[np.float32]]) -> Run:
    """Return an engine that pads batches to their longest text."""

    def run(texts: Sequence[Sequence[int]]) -> Logits:
        rows = [
            (batch, answer([texts[i] for i in batch])) for batch in _batches(texts, padded=True)
        ]
        joined = np.empty((len(texts), rows[0][1].shape[1]), np.float32)
        for batch, logits in rows:
            joined[batch] = logits
        ends = np.cumsum([len(labels) for labels in HEADS.values()])[:-1]
        return dict(zip(HEADS, np.split(joined, ends, axis=1), strict=True))

    return run


def _ours(engine: PackedEngine) -> Run:
    def run(texts: Sequence[Sequence[int]]) -> Logits:
        logits = {n: np.empty((len(texts), len(labels)), np.float32) for n, labels in HEADS.items()}
        for batch in _batches(texts, padded=False):
            for name, values in engine.run([texts[i] for i in batch]).items():
                logits[name][batch] = values
        return logits

    return run


def _batches(texts: Sequence[Sequence[int]], *, padded: bool) -> list[list[int]]:
    """Return texts sorted by length, as many a batch as the budget of tokens holds."""
    batches: list[list[int]] = []
    size = 0
    for index in sorted(range(len(texts)), key=lambda i: len(texts[i])):
        length = len(texts[index])
        grown = (len(batches[-1]) + 1) * length if padded and batches else size + length
        if not batches or grown > BATCH_TOKENS:
            batches.append([])
            size = 0
        batches[-1].append(index)
        size += length
    return batches


def _cpu_seconds(run: Run, texts: Sequence[Sequence[int]]) -> float:
    started = time.process_time()
    run(texts)
    return time.process_time() - started


def _agreement(exact: Logits, found: Logits) -> float:
    return float(np.mean([np.mean(exact[h].argmax(-1) == found[h].argmax(-1)) for h in HEADS]))


if __name__ == "__main__":
    main()
