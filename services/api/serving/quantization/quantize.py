"""Quantizes a student to 8 bits and decides whether it may serve in them.

    python -m services.api.serving.quantization.quantize ARTIFACT DATASET [--texts 500]

Held-out texts of the dataset are classified in float32 and in 8 bits. The int8 student may serve only if
every head agrees and keeps its macro-F1; the decision and its figures are stored in the artifact.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from services.api.serving.encoder import DEFAULT_MAX_LENGTH
from services.api.serving.engines.dtype import choose_dtype
from services.api.serving.engines.encoder_weights import ENCODER_FAMILIES
from services.api.serving.engines.packed_engine import PackedEngine, unsupported_reason
from services.api.serving.engines.packed_weights import take_heads
from services.api.serving.engines.padded_engine import PaddedEngine
from services.api.serving.engines.torch_threads import use_threads
from services.api.serving.prediction import FloatArray
from services.api.serving.quantization.int8_linear import Int8Ops, activation_limit
from services.api.serving.quantization.record import (
    INT8_KIND,
    QuantizationRecord,
    manifest_sha256_of,
    write_quantization_record,
)
from services.api.serving.quantization.smoothquant import activation_maxima, smooth
from services.api.serving.quantization.weights_file import load_int8_backbone, save_int8_weights
from services.api.serving.settings import ServingDtype
from services.shared.datasets.card import Head, Split
from services.shared.jobs.gates import HeadComparison
from services.shared.model.artifact import load_classifier, read_artifact
from services.shared.model.calibration import Calibration
from services.shared.model.metrics import head_metrics, labelled_mask, predict
from services.shared.model.tokens import Rows, encode, load_tokenizer, read_rows

MIN_AGREEMENT = 0.99
MAX_MACRO_F1_LOSS = 0.003
# Enough to find every outlier channel; the SmoothQuant paper used 512 sentences.
CALIBRATION_TEXTS = 128
BATCH_TOKENS = 512


def quantize_student(
    artifact_dir: Path, dataset_dir: Path, *, texts: int, threads: int
) -> QuantizationRecord:
    """Write the int8 weights and the record into an artifact and return the record.

    Calibrated on training texts, compared on texts of the test split (validation if that is empty).
    Raises ValueError if the packed engine cannot run the backbone or no text is held out.
    """
    use_threads(threads)
    artifact = read_artifact(artifact_dir)
    classifier = load_classifier(artifact_dir, dtype=torch.float32)
    max_length = artifact.max_length or DEFAULT_MAX_LENGTH
    if reason := unsupported_reason(classifier.config, max_length=max_length):
        raise ValueError(f"{artifact_dir} cannot be quantized: {reason}")
    tokenizer = load_tokenizer(artifact_dir, artifact.text_kind)
    held_out = _held_out(dataset_dir, artifact.heads, texts)
    calibration = read_rows(dataset_dir, Split.TRAIN, artifact.heads).texts[:CALIBRATION_TEXTS]
    tokens, train_tokens = (
        encode(texts, tokenizer, max_length=max_length, prefix=artifact.prefix)[0]
        for texts in (held_out.texts, calibration)
    )

    reference = PaddedEngine(classifier, batch_tokens=BATCH_TOKENS)
    expected = _run(reference, tokens, threads=threads)
    # An encoder's norms feed its residuals as well, so that they cannot be divided: it is quantized as it is.
    if classifier.config.model_type not in ENCODER_FAMILIES:
        smooth(classifier, activation_maxima(classifier, train_tokens))
    # As it would be served on this machine, in whose dtype everything that is not int8 is computed.
    dtype = choose_dtype(ServingDtype.AUTO, torch.device("cpu"))
    heads = {n: (w.to(dtype), b.to(dtype)) for n, (w, b) in take_heads(classifier).items()}
    weights_sha256 = save_int8_weights(classifier, artifact_dir, max_length=max_length)
    backbone = load_int8_backbone(artifact_dir, max_length=max_length, dtype=dtype, ops=Int8Ops())
    actual = _run(PackedEngine(backbone, heads, kind=INT8_KIND), tokens, threads=threads)

    comparisons = compare_heads(
        artifact.heads, held_out, expected=expected, actual=actual, calibration=artifact.calibration
    )
    record = QuantizationRecord(
        manifest_sha256=manifest_sha256_of(artifact_dir),
        weights_sha256=weights_sha256,
        largest_activation=activation_limit(),
        calibration_texts=len(calibration),
        heads=comparisons,
        passed=all(head.passed for head in comparisons.values()),
    )
    write_quantization_record(artifact_dir, record)
    return record


def compare_heads(
    heads: Sequence[Head],
    rows: Rows,
    *,
    expected: Mapping[str, FloatArray],
    actual: Mapping[str, FloatArray],
    calibration: Mapping[str, Calibration],
) -> dict[str, HeadComparison]:
    """Compare two sets of logits [N, C] head by head, with the same thresholds.

    Agreement counts texts for a single-label head and every label of every text for a multi-label one.
    """
    result = {}
    for head in heads:
        thresholds = calibration.get(head.name, Calibration()).logit_thresholds(head)
        reference = predict(head, expected[head.name], thresholds)
        quantized = predict(head, actual[head.name], thresholds)
        agreement = float(np.mean(reference == quantized))
        before = head_metrics(head, predicted=reference, labels=rows.labels[head.name]).macro_f1
        after = head_metrics(head, predicted=quantized, labels=rows.labels[head.name]).macro_f1
        has_labels = bool(labelled_mask(head, rows.labels[head.name]).any())
        result[head.name] = HeadComparison(
            texts=len(rows),
            agreement=agreement,
            macro_f1=after,
            macro_f1_float32=before,
            passed=agreement >= MIN_AGREEMENT
            and has_labels
            and before - after <= MAX_MACRO_F1_LOSS,
        )
    return result


def _held_out(dataset_dir: Path, heads: Sequence[Head], texts: int) -> Rows:
    for split in (Split.TEST, Split.VALIDATION):
        rows = read_rows(dataset_dir, split, heads)
        if len(rows):
            labels = {name: values[:texts] for name, values in rows.labels.items()}
            return Rows(rows.texts[:texts], rows.lines[:texts], labels)
    raise ValueError(f"{dataset_dir} has no held-out texts to compare on")


def _run(
    engine: PaddedEngine | PackedEngine, tokens: Sequence[Sequence[int]], *, threads: int
) -> dict[str, FloatArray]:
    """Run texts in small batches, so that memory holds the activations of few."""
    size = 16
    order = sorted(range(len(tokens)), key=lambda index: len(tokens[index]))
    parts = [
        engine.run([tokens[index] for index in order[start : start + size]], threads=threads)
        for start in range(0, len(order), size)
    ]
    result: dict[str, FloatArray] = {}
    for name in parts[0]:
        packed = np.concatenate([part[name] for part in parts])
        result[name] = np.empty_like(packed)
        result[name][order] = packed
    return result


def main() -> None:
    """Quantize one artifact; exit 0 if it may serve in 8 bits, 3 if not, 1 if it cannot be quantized."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument(
        "--texts", type=int, default=500, help="number of held-out texts to compare on"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nice", type=int, default=0, help="niceness of the process, 0 to 19")
    options = parser.parse_args()
    os.nice(options.nice)
    try:
        record = quantize_student(
            options.artifact, options.dataset, texts=options.texts, threads=options.threads
        )
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(record.model_dump_json(indent=2))
    sys.exit(0 if record.passed else 3)


if __name__ == "__main__":
    main()
