"""What an artifact says of itself to other programs: labels and limits in their files, and a model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.shared.datasets.card import Head, HeadType
from services.shared.datasets.text import TextKind
from services.shared.files.atomic_write import write_text
from services.shared.jobs.evaluation_text import (
    BASELINE,
    compare_with_baseline,
    figures,
    format_level,
)
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.licence import Licence
from services.shared.model.sentence_transformers import write_sentence_transformers_files

MODEL_CARD = "README.md"
BASE_MODEL, TEACHER = "base model", "teacher"
_LOADING = "## Loading"


def classification_fields(head: Head) -> dict[str, Any]:
    """Return the fields of a transformers configuration that describe a head."""
    many = head.type is HeadType.MULTI_LABEL
    return {
        "id2label": {str(index): label for index, label in enumerate(head.labels)},
        "label2id": {label: index for index, label in enumerate(head.labels)},
        "problem_type": f"{'multi' if many else 'single'}_label_classification",
    }


def describe_artifact(
    directory: Path,
    *,
    heads: Sequence[Head],
    text_kind: TextKind,
    pooling: Pooling,
    prefix: str,
    max_length: int | None,
    lineage: Mapping[str, Any],
    metrics: Mapping[str, Any],
    licences: Mapping[str, Licence],
) -> None:
    """Write labels to config.json, the length to tokenizer_config.json, pooling and prefix to the files of
    sentence-transformers, and the model card.

    Labels of several heads have no place in config.json: those left from a parent model are removed.
    """
    fields = dict.fromkeys(("id2label", "label2id", "problem_type"))
    _update(
        directory / "config.json",
        classification_fields(heads[0]) if len(heads) == 1 else fields,
    )
    if max_length is not None:
        _update(directory / "tokenizer_config.json", {"model_max_length": max_length})
    write_sentence_transformers_files(
        directory, pooling=pooling, prefix=prefix, max_length=max_length
    )
    card = model_card(
        heads=heads,
        text_kind=text_kind,
        pooling=pooling,
        prefix=prefix,
        max_length=max_length,
        lineage=lineage,
        metrics=metrics,
        licences=licences,
    )
    write_text(directory / MODEL_CARD, card)


def model_card(
    *,
    heads: Sequence[Head],
    text_kind: TextKind,
    pooling: Pooling,
    prefix: str,
    max_length: int | None,
    lineage: Mapping[str, Any],
    metrics: Mapping[str, Any],
    licences: Mapping[str, Licence],
) -> str:
    """Return the model card in Markdown, with the metadata block that model hubs read.

    `licences` are those of the models it was made from, by their part in it: BASE_MODEL, TEACHER.
    """
    kind = "student" if lineage.get("kind") == "distill" else str(lineage.get("kind", "model"))
    lines = ["---", "library_name: transformers", "pipeline_tag: text-classification"]
    lines += ["tags: [stillhouse, text-classification]"]
    base = licences.get(BASE_MODEL)
    lines += [f"license: {base.name}"] if base and base.name else []
    lines += ["---", "", f"# Text classifier ({kind})"]
    lines += ["", "## Heads", "", "| head | kind | labels |", "|---|---|---|"]
    lines += [f"| {head.name} | {head.type} | {_labels(head.labels)} |" for head in heads]
    lines += ["", "## Input", "", _INPUTS[text_kind]]
    read = "the mean of all tokens" if pooling is Pooling.MEAN else f"the {pooling} token"
    lines += ["", f"The heads read {read}."]
    if prefix:
        lines += [f"Each text is preceded by `{prefix}`, which `stillhouse` adds by itself."]
    lines += ["", "## Lineage", ""]
    lines += [f"- {name}: `{_plain(value)}`" for name, value in lineage.items()]
    lines += ["", "## Metrics", "", *_metrics(metrics)]
    lines += [
        "",
        "## Intended use and limits",
        "",
        "Assigns the labels above to texts like those of its dataset; on other kinds of text, languages "
        "or time periods the metrics above do not hold. Probabilities are calibrated only where "
        "`heads.json` has a calibration. Not meant as the only basis of a decision about a person.",
    ]
    if max_length is not None:
        lines += [f"Texts longer than {max_length} tokens are truncated on the right."]
    lines += ["", "## Licence", ""]
    lines += [f"- {part}: {licence.sentence()}." for part, licence in licences.items()]
    if BASE_MODEL not in licences:
        lines += ["- The weights were trained from scratch."]
    lines += ["- The licence of the dataset is not recorded."]
    lines += [
        "",
        _LOADING,
        "",
        "`AutoModel.from_pretrained` loads the backbone. `AutoModelForSequenceClassification` refuses this "
        "directory, since the heads are in `classifier_heads.safetensors`: use "
        "`stillhouse models export`.",
    ]
    return "\n".join(lines) + "\n"


def exported_card(card: str, *, loading: str) -> str:
    """Return the model card of an export: that of its artifact, with another way of loading it."""
    return f"{card.partition(_LOADING)[0]}{_LOADING}\n\n{loading}\n"


_INPUTS = {
    TextKind.SINGLE: "One text.",
    TextKind.PAIR: "A pair of texts, encoded by `tokenizer(text, text_pair)`; the longer one is truncated first.",
    TextKind.CHAT: "Chat messages, rendered by `tokenizer.apply_chat_template` and encoded without further special "
    "tokens; by a tokenizer without a template, lines of `role: content`.",
}


def _metrics(metrics: Mapping[str, Any]) -> list[str]:
    heads: Mapping[str, dict[str, Any]] = metrics.get("heads") or {}
    if not heads:
        return ["None: the dataset has no labelled test or validation texts."]
    confidence = metrics.get("confidence")
    level = f", with {format_level(confidence)} bootstrap intervals" if confidence else ""
    lines = [f"On the {metrics.get('split', 'test')} split{level}:", ""]
    lines += ["| model | head | accuracy | macro-F1 |", "|---|---|---|---|"]
    lines += [
        f"| {row.model} | {row.head} | {row.accuracy} | {row.macro_f1} |"
        for row in figures(metrics, model="this model")
    ]
    lines += _against_baseline(heads, confidence)
    rest = [
        f"| {head} | {name} | {value:.4f} |"
        for head, values in heads.items()
        for name, value in values.items()
        if isinstance(value, float) and name not in ("accuracy", "macro_f1")
    ]
    return [*lines, "", "| head | metric | value |", "|---|---|---|", *rest] if rest else lines


def _against_baseline(heads: Mapping[str, Any], confidence: float | None) -> list[str]:
    """Return one line for each head that has a baseline."""
    verdicts = compare_with_baseline(heads, confidence=confidence, model="model")
    lines = [f"- {verdict.sentence}" for verdict in verdicts]
    explanation = (
        f"{BASELINE} is logistic regression on character n-grams of the same labelled texts:"
    )
    return ["", explanation, "", *lines] if lines else []


def _labels(labels: Sequence[str]) -> str:
    shown = ", ".join(label.replace("|", "\\|").replace("\n", " ") for label in labels[:20])
    return shown if len(labels) <= 20 else f"{shown} and {len(labels) - 20} more"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _update(path: Path, fields: Mapping[str, Any]) -> None:
    """Set fields of a JSON file that exists; None removes one."""
    if not path.is_file():
        return
    merged = json.loads(path.read_text("utf-8")) | dict(fields)
    kept = {
        name: value for name, value in merged.items() if name not in fields or value is not None
    }
    write_text(path, json.dumps(kept, ensure_ascii=False, indent=2) + "\n")
