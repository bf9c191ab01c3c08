"""The model artifact: a directory that serving, distillation and plain transformers all read.

    config.json, *.safetensors      the backbone, as AutoModel.from_pretrained loads it, and an empty tensor
                                    that AutoModelForSequenceClassification refuses
    classifier_heads.safetensors    <head>.weight [C, H], <head>.bias [C]
    heads.json                      HeadsFile: pooling, prefix, heads, maximum length, calibration
    tokenizer files
    modules.json, 1_Pooling/ ...    pooling and prefix again, for sentence-transformers
    README.md                       the model card
    LICENSE ...                     of the base model, as its directory has them
    golden.json                     Golden: a few texts with their expected logits
    manifest.json                   Manifest, written last: sha256 of every other file and of itself

safetensors only: nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerBase
from transformers.utils import logging

from services.shared.datasets.card import Head
from services.shared.datasets.text import Text, TextKind, from_columns, kind_of, to_columns
from services.shared.files.atomic_write import sync
from services.shared.files.hashing import file_sha256
from services.shared.files.sealed_json import seal, unseal
from services.shared.jobs.artifact_layout import GOLDEN, HEADS_FILE, HEADS_WEIGHTS, MANIFEST
from services.shared.jobs.run_directory import write_json
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.calibration import Calibration
from services.shared.model.classifier import Classifier, supported_attention, wrap_backbone
from services.shared.model.description import BASE_MODEL, describe_artifact
from services.shared.model.licence import copy_licence
from services.shared.model.tokens import encode, pad

# Logits of the same text differ by rounding between batch shapes, kernels and devices: bfloat16 keeps
# 8 bits, and dozens of layers lose some of them. Relative to 1 + the largest logit of the text; a wrong
# weight or tokenizer is far outside the tolerance.
GOLDEN_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.05, torch.bfloat16: 0.25}


class InvalidArtifact(ValueError):
    """A directory is not a complete, unaltered model artifact."""


class _ArtifactFile(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


FileT = TypeVar("FileT", bound=_ArtifactFile)


class HeadsFile(_ArtifactFile):
    """The heads, and how the model that they read was trained to read texts."""

    pooling: Pooling
    prefix: str = ""  # before each text
    heads: list[Head]
    text_kind: TextKind = TextKind.SINGLE
    max_length: int | None = None  # tokens per text in training
    calibration: dict[str, Calibration] = {}  # by head; absent: uncalibrated


class Manifest(_ArtifactFile):
    """Lineage and metrics of the model, and the hashes of its files."""

    format: int = 2  # 1: without a checksum of the manifest itself
    lineage: dict[str, Any]
    metrics: dict[str, Any]
    parameters: int
    size_bytes: int
    files: dict[str, str]  # name -> sha256


class GoldenText(_ArtifactFile):
    """A text, in the columns of a stored dataset, and the logits [C] by head that the exported model gave."""

    text: str
    text_pair: str | None = None
    logits: dict[str, list[float]]


class Golden(_ArtifactFile):
    """Texts with expected logits, to check a loaded model before it serves."""

    max_length: int | None
    text_kind: TextKind = TextKind.SINGLE
    prefix: str = ""
    texts: list[GoldenText]

    def inputs(self) -> list[Text]:
        """Return the texts."""
        return [from_columns(self.text_kind, each.text, each.text_pair) for each in self.texts]


@dataclass(frozen=True)
class Artifact:
    """The metadata of a model directory; weights are not loaded."""

    directory: Path
    heads: list[Head]
    pooling: Pooling
    text_kind: TextKind
    prefix: str
    max_length: int | None
    calibration: dict[str, Calibration]
    manifest: Manifest | None  # None while the artifact is not sealed


@dataclass(frozen=True)
class SealedArtifact:
    """What the registry stores of an artifact."""

    sha256: str  # of manifest.json, which contains those of all other files
    size_bytes: int
    parameters: int


def read_artifact(directory: Path | str) -> Artifact:
    """Read the metadata of an artifact. Raises InvalidArtifact."""
    path = Path(directory)
    heads = _read(path / HEADS_FILE, HeadsFile)
    sealed = (path / MANIFEST).exists()
    return Artifact(
        directory=path,
        heads=heads.heads,
        pooling=heads.pooling,
        text_kind=heads.text_kind,
        prefix=heads.prefix,
        max_length=heads.max_length,
        calibration=heads.calibration,
        manifest=_read(path / MANIFEST, Manifest) if sealed else None,
    )


def verify_artifact(artifact: Artifact) -> None:
    """Compare every file with the manifest's hash. Raises InvalidArtifact naming the first that differs."""
    if artifact.manifest is None:
        raise InvalidArtifact(f"{artifact.directory} has no {MANIFEST}: its export did not finish")
    for name, expected in artifact.manifest.files.items():
        path = artifact.directory / name
        if not path.is_file():
            raise InvalidArtifact(f"{artifact.directory}: {name} is missing")
        if file_sha256(path) != expected:
            raise InvalidArtifact(f"{artifact.directory}: {name} is not the file that was exported")


def load_classifier(
    directory: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    attention: str = "sdpa",
) -> Classifier:
    """Return an artifact's classifier in evaluation mode; `dtype` None keeps the stored one.

    Raises InvalidArtifact where files are missing, damaged or inconsistent.
    """
    artifact = read_artifact(directory)
    backbone = load_backbone(artifact.directory, dtype=dtype, attention=attention)
    try:
        classifier = wrap_backbone(backbone, artifact.heads, pooling=artifact.pooling)
    except ValueError as error:
        raise InvalidArtifact(f"{artifact.directory / HEADS_FILE}: {error}") from error
    set_heads(classifier, read_heads(artifact.directory, artifact.heads))
    return classifier.to(device).eval()


def load_backbone(
    directory: Path, *, dtype: torch.dtype | None = None, attention: str = "sdpa"
) -> Any:
    """Return the backbone of any local Hugging Face directory. Raises InvalidArtifact."""
    factory: Any = AutoModel
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # this process writes logs, not a terminal
    verbosity = logging.get_verbosity()
    # Its report of keys would name our empty head tensor at each load; missing keys are checked below.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        config = AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        backbone, info = factory.from_pretrained(
            str(directory),
            config=config,
            dtype="auto" if dtype is None else dtype,
            attn_implementation=supported_attention(config, attention),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise InvalidArtifact(f"{directory} cannot be loaded as a model: {error}") from error
    finally:
        logging.set_verbosity(verbosity)
    # Without this check transformers fills the gaps with random numbers and only logs it.
    missing = sorted(key for key in info["missing_keys"] if not key.startswith("pooler."))
    if missing:
        raise InvalidArtifact(f"{directory}: weights are missing, among them {missing[0]}")
    return backbone


def read_heads(directory: Path, heads: Sequence[Head]) -> dict[str, Tensor]:
    """Return the heads' weights as `<head>.weight|bias`. Raises InvalidArtifact."""
    path = directory / HEADS_WEIGHTS
    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InvalidArtifact(f"{path} cannot be read: {error}") from error
    for head in heads:
        bias = weights.get(f"{head.name}.bias")
        if (
            bias is None
            or bias.shape != (len(head.labels),)
            or f"{head.name}.weight" not in weights
        ):
            raise InvalidArtifact(
                f"{path} does not contain head {head.name} of {len(head.labels)} labels"
            )
    return weights


@torch.no_grad()
def set_heads(classifier: Classifier, weights: Mapping[str, Tensor]) -> None:
    """Copy the heads' weights into a whole (unsharded) classifier. Raises InvalidArtifact."""
    for name, parameter in classifier.heads.named_parameters():
        if weights[name].shape != parameter.shape:
            raise InvalidArtifact(
                f"{name} is {list(weights[name].shape)} in {HEADS_WEIGHTS}, but the backbone "
                f"needs {list(parameter.shape)}"
            )
        parameter.copy_(weights[name])


def save_classifier(classifier: Classifier, directory: Path) -> None:
    """Write the weights of a whole (unsharded) classifier; the artifact is not sealed yet."""
    directory.mkdir(parents=True, exist_ok=True)
    classifier.backbone.save_pretrained(str(directory))
    write_heads(directory, classifier.heads.state_dict())


def write_heads(directory: Path, weights: Mapping[str, Tensor]) -> None:
    """Write `classifier_heads.safetensors` from `<head>.weight|bias`."""
    whole = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    save_file(whole, directory / HEADS_WEIGHTS, metadata={"format": "pt"})


def seal_artifact(
    directory: Path,
    *,
    heads: Sequence[Head],
    pooling: Pooling,
    prefix: str,
    lineage: Mapping[str, Any],
    metrics: Mapping[str, Any],
    text_kind: TextKind = TextKind.SINGLE,
    max_length: int | None = None,
    calibration: Mapping[str, Calibration] | None = None,
    made_from: Mapping[str, Path] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> SealedArtifact:
    """Complete an artifact that has weights and tokenizer: heads.json, descriptions, then manifest.json.

    `made_from` are the directories of its BASE_MODEL and its TEACHER, whose licences are kept. Every file is
    synced to disk before the manifest is written; `extra` is added to the manifest.
    """
    heads_file = HeadsFile(
        pooling=pooling,
        prefix=prefix,
        heads=list(heads),
        text_kind=text_kind,
        max_length=max_length,
        calibration=dict(calibration or {}),
    )
    write_json(directory / HEADS_FILE, heads_file)
    describe_artifact(
        directory,
        heads=heads,
        text_kind=text_kind,
        pooling=pooling,
        prefix=prefix,
        max_length=max_length,
        lineage=lineage,
        metrics=metrics,
        licences={
            part: copy_licence(source, directory, prefix="" if part == BASE_MODEL else f"{part}-")
            for part, source in (made_from or {}).items()
        },
    )
    files = sorted(p for p in directory.rglob("*") if p.is_file() and p.name != MANIFEST)
    for path in {path.parent for path in files} | set(files):
        sync(path)
    parameters = count_parameters(directory)
    size_bytes = sum(p.stat().st_size for p in files)
    manifest = Manifest(
        lineage=dict(lineage),
        metrics=dict(metrics),
        parameters=parameters,
        size_bytes=size_bytes,
        files={p.relative_to(directory).as_posix(): file_sha256(p) for p in files},
        **dict(extra or {}),
    )
    write_json(directory / MANIFEST, seal(json.loads(manifest.model_dump_json())))
    sync(directory)
    return SealedArtifact(file_sha256(directory / MANIFEST), size_bytes, parameters)


@torch.no_grad()
def record_golden(
    classifier: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    *,
    max_length: int | None,
    prefix: str,
) -> Golden:
    """Return a few texts with their logits, run one by one on the classifier's device.

    Collective for a sharded classifier: every rank passes the same texts.
    """
    device = next(classifier.parameters()).device
    tokens, _ = encode(texts, tokenizer, max_length=max_length, prefix=prefix)
    entries = []
    for text, ids in zip(texts, tokens, strict=True):
        logits = classifier(*pad([ids], tokenizer.pad_token_id).to(device))
        stored, text_pair = to_columns(text)
        entries.append(
            GoldenText(
                text=stored,
                text_pair=text_pair,
                logits={name: row[0].tolist() for name, row in logits.items()},
            )
        )
    kind = kind_of(texts[0]) if texts else TextKind.SINGLE
    return Golden(max_length=max_length, text_kind=kind, prefix=prefix, texts=entries)


def save_golden(directory: Path, golden: Golden) -> None:
    """Write golden texts to an artifact that is not sealed yet."""
    write_json(directory / GOLDEN, golden)


def check_golden(
    directory: Path, classifier: Classifier, tokenizer: PreTrainedTokenizerBase
) -> float | None:
    """Return the largest relative difference from the recorded logits; None where none are recorded.

    Raises InvalidArtifact where it exceeds GOLDEN_TOLERANCE.
    """
    if not (directory / GOLDEN).exists():
        return None
    golden = _read(directory / GOLDEN, Golden)
    actual = record_golden(
        classifier,
        tokenizer,
        golden.inputs(),
        max_length=golden.max_length,
        prefix=golden.prefix,
    )
    differences = [torch.zeros(())]
    for expected, found in zip(golden.texts, actual.texts, strict=True):
        if expected.logits.keys() != found.logits.keys():
            raise InvalidArtifact(f"{directory}: {GOLDEN} was recorded for other heads")
        for head, recorded in expected.logits.items():
            logits = torch.tensor(recorded)
            difference = (torch.tensor(found.logits[head]) - logits).abs().max()
            differences.append(difference / (1 + logits.abs().max()))
    worst = float(torch.stack(differences).max())  # NaN if any is
    tolerance = GOLDEN_TOLERANCE[next(classifier.parameters()).dtype]
    if not worst <= tolerance:
        raise InvalidArtifact(
            f"{directory}: the loaded model gives its golden texts logits off by {worst:.3g} "
            f"(rounding explains {tolerance}); weights or tokenizer are not those exported"
        )
    return worst


def weights_sha256(directory: Path) -> str:
    """Return one hash of the names and contents of all weight files of a model directory."""
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def count_parameters(directory: Path) -> int:
    """Return the number of parameters in the weight files of a model directory."""
    count = 0
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        count += sum(int(torch.Size(shape).numel()) for shape in shapes)
    return count


def _read(path: Path, kind: type[FileT]) -> FileT:
    try:
        return kind.model_validate(unseal(path.read_bytes()))
    except FileNotFoundError as error:
        raise InvalidArtifact(f"{path.parent} has no {path.name}") from error
    except ValueError as error:
        raise InvalidArtifact(f"{path} is damaged: {error}") from error
