"""Prepares a student for 8-bit serving and decides whether it may serve so.

    python -m services.api.serving.quantization.quantize ARTIFACT DATASET [--texts 500]

Held-out texts of the dataset are answered in float32 and in 8 bits. The 8-bit student serves only if
every head agrees and keeps its macro-F1; the decision and its numbers lie beside the artifact.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from services.api.serving.engines.dtype import DEFAULT_MAX_LENGTH, choose_dtype
from services.api.serving.engines.packed_engine import PackedEngine
from services.api.serving.engines.packed_weights import take_heads, why_not
from services.api.serving.engines.padded_engine import TransformersEngine
from services.api.serving.engines.torch_threads import use_threads
from services.api.serving.prediction import FloatArray
from services.api.serving.quantization.int8_linear import Conversions, largest_activation
from services.api.serving.quantization.record import PreparedInt8, manifest_hash, write_prepared
from services.api.serving.quantization.smoothquant import largest_activations, smooth
from services.api.serving.quantization.weights_file import load_backbone, save_weights
from services.api.serving.settings import ServingDtype
from services.shared.datasets.card import Head, Split
from services.shared.jobs.gates import HeadComparison
from services.shared.model.artifact import load_classifier, read_artifact
from services.shared.model.calibration import Calibration
from services.shared.model.metrics import head_metrics, labelled, predict
from services.shared.model.tokens import Rows, encode, load_tokenizer, read_rows

MIN_AGREEMENT = 0.99
MAX_MACRO_F1_LOSS = 0.003
# Enough to see every outlier channel; the paper used 512 sentences.
CALIBRATION_TEXTS = 128
BATCH_TOKENS = 512


def prepare_int8(
    artifact_dir: Path, dataset_dir: Path, *, texts: int, threads: int
) -> PreparedInt8:
    """Write the 8-bit student beside its artifact and return how it compares.

    Smoothed on training texts, compared on texts of the test split (validation where that is empty).
    Raises ValueError where the backbone cannot be packed or no text is held out.
    """
    use_threads(threads)
    artifact = read_artifact(artifact_dir)
    classifier = load_classifier(artifact_dir, dtype=torch.float32)
    max_length = artifact.max_length or DEFAULT_MAX_LENGTH
    if obstacle := why_not(classifier.config, max_length=max_length):
        raise ValueError(f"{artifact_dir} cannot be prepared: {obstacle}")
    tokenizer = load_tokenizer(artifact_dir)
    held_out = _held_out(dataset_dir, artifact.heads, texts)
    calibration = read_rows(dataset_dir, Split.TRAIN, artifact.heads).texts[:CALIBRATION_TEXTS]
    tokens, _ = encode(held_out.texts, tokenizer, max_length=max_length)
    train_tokens, _ = encode(calibration, tokenizer, max_length=max_length)

    exact = TransformersEngine(classifier, batch_tokens=BATCH_TOKENS)
    expected = _run(exact, tokens, threads=threads)
    smooth(classifier, largest_activations(classifier, train_tokens))
    # As it would serve here: what is not 8-bit is computed in the machine's own type.
    dtype = choose_dtype(ServingDtype.AUTO, torch.device("cpu"))
    heads = {n: (w.to(dtype), b.to(dtype)) for n, (w, b) in take_heads(classifier).items()}
    weights_sha256 = save_weights(classifier, artifact_dir)
    backbone = load_backbone(
        artifact_dir, max_length=max_length, dtype=dtype, conversions=Conversions()
    )
    given = _run(PackedEngine(backbone, heads, kind="packed-int8"), tokens, threads=threads)

    compared = compare(
        artifact.heads, held_out, expected=expected, given=given, calibration=artifact.calibration
    )
    prepared = PreparedInt8(
        manifest_sha256=manifest_hash(artifact_dir),
        weights_sha256=weights_sha256,
        largest_activation=largest_activation(),
        calibration_texts=len(calibration),
        heads=compared,
        passed=all(head.passed for head in compared.values()),
    )
    write_prepared(artifact_dir, prepared)
    return prepared


def compare(
    heads: Sequence[Head],
    rows: Rows,
    *,
    expected: Mapping[str, FloatArray],
    given: Mapping[str, FloatArray],
    calibration: Mapping[str, Calibration],
) -> dict[str, HeadComparison]:
    """Compare two sets of logits [N, C] head by head, answered by the same thresholds.

    Agreement is over texts for a single-label head and over every label of every text for a
    multi-label one.
    """
    result = {}
    for head in heads:
        cuts = calibration.get(head.name, Calibration()).cuts(head)
        wanted = predict(head, expected[head.name], cuts)
        found = predict(head, given[head.name], cuts)
        agreement = float(np.mean(wanted == found))
        before = head_metrics(head, predicted=wanted, labels=rows.labels[head.name]).macro_f1
        after = head_metrics(head, predicted=found, labels=rows.labels[head.name]).macro_f1
        has_labels = bool(labelled(head, rows.labels[head.name]).any())
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
    raise ValueError(f"{dataset_dir} holds no text out, so nothing can be compared")


def _run(
    engine: TransformersEngine | PackedEngine, tokens: Sequence[Sequence[int]], *, threads: int
) -> dict[str, FloatArray]:
    """Run many texts in slices, so that memory holds the activations of few."""
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
    """Prepare one artifact; exit 0 if it may serve in 8 bits, 3 if not, 1 where it cannot be tried."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", type=Path)
    parser.add_argument("dataset", type=Path)
    parser.add_argument("--texts", type=int, default=500, help="held-out texts to compare on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--nice", type=int, default=0, help="priority to give up, 0 to 19")
    options = parser.parse_args()
    os.nice(options.nice)
    try:
        prepared = prepare_int8(
            options.artifact, options.dataset, texts=options.texts, threads=options.threads
        )
    except (ValueError, OSError) as error:
        sys.exit(str(error))
    print(prepared.model_dump_json(indent=2))
    sys.exit(0 if prepared.passed else 3)


if __name__ == "__main__":
    main()
