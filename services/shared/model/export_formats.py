"""Exports an artifact for programs that know nothing of ours: transformers and ONNX.

Run by `stillhouse models export` as a process of its own: `python -m services.shared.model.export_formats
ARTIFACT --format onnx --out DIR`. What is written is loaded again and compared before it is reported.
"""

from __future__ import annotations

import argparse
import errno
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from services.shared.datasets.card import Head
from services.shared.datasets.text import Chat, Message, Pair, Text, TextKind
from services.shared.files.atomic_write import partial_path, sync, write_text
from services.shared.jobs.artifact_layout import GOLDEN
from services.shared.model.artifact import (
    Artifact,
    Golden,
    InvalidArtifact,
    load_classifier,
    read_artifact,
    verify_artifact,
)
from services.shared.model.classifier import Classifier
from services.shared.model.description import MODEL_CARD, exported_card
from services.shared.model.licence import copy_licence
from services.shared.model.sequence_classification import NotExpressible, sequence_classifier
from services.shared.model.tokens import Padded, encode, load_tokenizer, pad

# Relative to 1 + the largest logit; both sides compute in float32.
TOLERANCE = 1e-4
ONNX_FILE = "model.onnx"
_TRANSFORMERS = (
    "`AutoModelForSequenceClassification.from_pretrained` gives the logits of the head `{head}`."
)
_ONNX = (
    f"`{ONNX_FILE}` has one output of logits for each head. `labels.json` has their labels, the prefix that is "
    "put before each text and the number of tokens that a text is truncated to."
)
_TEXTS = ("a", "A somewhat longer text, with several words.", "一个短句。")
_SAMPLES: dict[TextKind, Sequence[Text]] = {
    TextKind.SINGLE: _TEXTS,
    TextKind.PAIR: [Pair(text, other) for text, other in zip(_TEXTS, _TEXTS[::-1], strict=True)],
    TextKind.CHAT: [Chat((Message("user", text),)) for text in _TEXTS],
}


class ExportDiffers(ValueError):
    """The exported model does not give the artifact's logits."""


class NotConvertible(ValueError):
    """The exporter of torch cannot convert this architecture to ONNX."""


def export_artifact(directory: Path, *, format: str, out: Path) -> dict[str, float]:
    """Export an artifact to the directory `out`; return each head's largest relative difference.

    `out` is absent or empty, and is filled by one rename once everything has been verified. Raises
    InvalidArtifact, NotExpressible, NotConvertible, ExportDiffers, FileExistsError or ImportError.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(errno.EEXIST, "exists and is not an empty directory", str(out))
    staging = partial_path(out)
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        found = _write(directory, format=format, out=staging)
        for path in (*staging.rglob("*"), staging):
            sync(path)
        staging.rename(out)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return found


def _write(directory: Path, *, format: str, out: Path) -> dict[str, float]:
    artifact = read_artifact(directory)
    verify_artifact(artifact)
    classifier = load_classifier(directory, dtype=torch.float32)
    tokenizer = load_tokenizer(directory, artifact.text_kind)
    if format == "onnx":
        return _export_onnx(artifact, classifier, tokenizer, out)
    return {
        head.name: _export_transformers(
            artifact,
            classifier,
            tokenizer,
            head,
            out / head.name if len(artifact.heads) > 1 else out,
        )
        for head in artifact.heads
    }


def _export_transformers(
    artifact: Artifact,
    classifier: Classifier,
    tokenizer: PreTrainedTokenizerBase,
    head: Head,
    out: Path,
) -> float:
    pad_id = tokenizer.pad_token_id
    (sample, *_), _ = encode(
        _SAMPLES[artifact.text_kind][:1],
        tokenizer,
        max_length=artifact.max_length,
        prefix=artifact.prefix,
    )
    if classifier.causal and sample[-1] == pad_id:
        raise NotExpressible(
            "texts end in the padding token, which transformers' classifier passes over"
        )
    model = sequence_classifier(classifier, head)
    model.config.pad_token_id = pad_id
    if artifact.prefix:  # which the caller puts before each text
        model.config.prefix = artifact.prefix
    model.save_pretrained(str(out))
    tokenizer.save_pretrained(str(out))
    _describe(artifact, out, loading=_TRANSFORMERS.format(head=head.name))
    factory: Any = AutoModelForSequenceClassification
    loaded = factory.from_pretrained(
        str(out), local_files_only=True, trust_remote_code=False, use_safetensors=True
    ).eval()
    worst = 0.0
    for padded in _inputs(artifact, tokenizer):
        with torch.no_grad():
            found = loaded(**_named_inputs(classifier, padded)).logits
            worst = max(worst, _difference(found, classifier(*padded)[head.name]))
    return _accept(worst, head.name)


class _Outputs(nn.Module):
    """The classifier with its heads' logits as a tuple, in their order."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        logits = self.classifier(input_ids, attention_mask, token_type_ids)
        return tuple(logits[head.name] for head in self.classifier.head_specs)


def _export_onnx(
    artifact: Artifact, classifier: Classifier, tokenizer: PreTrainedTokenizerBase, out: Path
) -> dict[str, float]:
    """Write model.onnx with one output a head, checked by ONNX Runtime with several shapes of batch."""
    import onnxruntime  # an optional dependency

    names = [head.name for head in artifact.heads]
    batches = [_named_inputs(classifier, padded) for padded in _inputs(artifact, tokenizer)]
    _convert(classifier, batches[-1], names, out / ONNX_FILE)
    session = onnxruntime.InferenceSession(out / ONNX_FILE, providers=["CPUExecutionProvider"])
    worst = dict.fromkeys(names, 0.0)
    for batch in batches:
        outputs = session.run(names, {name: value.numpy() for name, value in batch.items()})
        with torch.no_grad():
            expected = classifier(**batch)
        for name, found in zip(names, outputs, strict=True):
            difference = _difference(torch.from_numpy(found), expected[name])
            worst[name] = max(worst[name], difference)
    tokenizer.save_pretrained(str(out))
    labels = {head.name: {"type": str(head.type), "labels": head.labels} for head in artifact.heads}
    described = {
        "heads": labels,
        "max_length": artifact.max_length,
        "prefix": artifact.prefix,
        "pooling": artifact.pooling,
    }
    text = json.dumps(described, ensure_ascii=False)
    (out / "labels.json").write_text(text + "\n", "utf-8")
    _describe(artifact, out, loading=_ONNX)
    return {name: _accept(value, name) for name, value in worst.items()}


def _convert(
    classifier: Classifier, batch: Mapping[str, Tensor], names: Sequence[str], file: Path
) -> None:
    """Write the ONNX model; the sizes of `batch` are only an example. Raises NotConvertible."""
    axes = {0: "batch", 1: "tokens"}
    if hasattr(classifier.config, "num_experts_per_tok"):
        # Grouped products have no ONNX operator, and loops over the experts hit are no graph.
        classifier.backbone.set_experts_implementation("batched_mm")
    try:
        # The exporter of TorchScript (dynamo=False) drops BERT's padding mask without a word: wrong by 0.5.
        torch.onnx.export(
            _Outputs(classifier).eval(),
            tuple(batch.values()),
            file,
            input_names=list(batch),
            output_names=list(names),
            dynamic_shapes=dict.fromkeys(batch, axes),
            dynamo=True,
            verbose=False,
        )
    except torch.onnx.OnnxExporterError as error:
        reason = str(error.__cause__ or error).strip().splitlines()
        raise NotConvertible(
            f"torch {torch.__version__} cannot convert {classifier.config.model_type} to ONNX"
            + (f": {reason[0]}" if reason else "")
        ) from error


def _describe(artifact: Artifact, out: Path, *, loading: str) -> None:
    """Give an export the artifact's model card and licences; artifacts of former versions have none."""
    copy_licence(artifact.directory, out)
    card = artifact.directory / MODEL_CARD
    if card.is_file():
        write_text(out / MODEL_CARD, exported_card(card.read_text("utf-8"), loading=loading))


def _named_inputs(classifier: Classifier, padded: Padded) -> dict[str, Tensor]:
    """Return the inputs by name: token types only where the model has them."""
    named = {name: value for name, value in padded._asdict().items() if value is not None}
    if not classifier.has_token_types:
        named.pop("token_type_ids", None)
    return named


def _inputs(artifact: Artifact, tokenizer: PreTrainedTokenizerBase) -> list[Padded]:
    """Return padded batches: a text alone, and the golden texts and samples."""
    texts = list(_SAMPLES[artifact.text_kind])
    golden = artifact.directory / GOLDEN
    if golden.exists():
        texts += Golden.model_validate_json(golden.read_bytes()).inputs()
    tokens, _ = encode(texts, tokenizer, max_length=artifact.max_length, prefix=artifact.prefix)
    batches = []
    for rows in (tokens[1:2], tokens):
        padded = pad(rows, tokenizer.pad_token_id)
        if padded.attention_mask is None:
            padded = padded._replace(attention_mask=torch.ones_like(padded.input_ids))
        batches.append(padded)
    return batches


def _difference(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / (1 + expected.abs().max()))


def _accept(difference: float, head: str) -> float:
    if not difference <= TOLERANCE:
        raise ExportDiffers(
            f"head {head}: the exported model's logits differ by {difference:.3g} (at most {TOLERANCE})"
        )
    return difference


def main() -> None:
    """Export, and print the differences as JSON; exit with 2 and a sentence where it is impossible."""
    parser = argparse.ArgumentParser(prog="export_formats")
    parser.add_argument("artifact", type=Path)
    parser.add_argument("--format", choices=("transformers", "onnx"), required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    try:
        found = export_artifact(options.artifact, format=options.format, out=options.out)
    except NotExpressible as error:
        print(f"{error}. Use --format onnx.", file=sys.stderr)
    except ImportError as error:
        print(f"{error}: install stillhouse[onnx].", file=sys.stderr)
    except FileExistsError:
        print(f"{options.out} exists and is not empty: choose another directory.", file=sys.stderr)
    except (InvalidArtifact, NotConvertible, ExportDiffers, OSError) as error:
        print(error, file=sys.stderr)
    else:
        print(json.dumps({"heads": found}))
        return
    sys.exit(2)


if __name__ == "__main__":
    main()
