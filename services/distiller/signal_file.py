"""The cache of a teacher's outputs between jobs, and its invalidation.

One safetensors file per teacher and corpus: the file name identifies both, the hashes in its header tell
whether the outputs are still valid, and a checksum whether they are as written.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from services.distiller.corpus import Corpus
from services.distiller.teacher import TeacherFiles
from services.shared.datasets.text import Text, strings_of
from services.shared.files.atomic_write import atomic_write
from services.shared.files.hashing import file_sha256
from services.shared.jobs.artifact_layout import HEADS_FILE
from services.shared.model.artifact import weights_sha256
from services.shared.model.classifier import TAPPED

log = logging.getLogger(__name__)


class SignalIdentity(BaseModel):
    """Everything that cached outputs depend on; they are valid only where every field is equal."""

    model_config = ConfigDict(frozen=True)

    teacher_sha256: str  # weights, heads and config
    tokenizer_sha256: str
    text_sha256: str  # of all texts, in order
    max_length: int  # tokens after which the teacher's texts are truncated
    precision: str
    outputs: dict[
        str, list[int]
    ]  # head -> the teacher's class indices in stored order; tapped layers


@dataclass(frozen=True)
class TeacherHashes:
    """Hashes of a teacher's files; for a large teacher they take minutes to compute."""

    model: str  # weights, heads and config
    tokenizer: str


class SignalFile:
    """One safetensors file of teacher outputs, replaced atomically."""

    def __init__(self, path: Path, identity: SignalIdentity) -> None:
        self.path = path
        self.identity = identity

    def read(self) -> dict[str, Tensor] | None:
        """Return the outputs; None where they are absent or, with a warning that says why, invalid."""
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, framework="pt") as file:
                cached = SignalIdentity.model_validate_json((file.metadata() or {})["identity"])
                difference = _difference(cached, self.identity)
                outputs = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                if difference is None and (file.metadata() or {})["sha256"] != _sha256(outputs):
                    difference = "it is damaged: its content does not match its checksum"
                if difference is None:
                    os.utime(self.path)  # retention counts from the last use
                    return outputs
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            difference = f"it cannot be read ({error})"
        log.warning("Ignoring the cached teacher outputs in %s: %s.", self.path, difference)
        return None

    def write(self, outputs: dict[str, Tensor]) -> None:
        """Write the outputs, rows of NaN for those not computed yet. Raises OSError."""
        with atomic_write(self.path) as temporary:
            metadata = {"identity": self.identity.model_dump_json(), "sha256": _sha256(outputs)}
            save_file(outputs, temporary, metadata=metadata)


def hash_teacher(directory: Path) -> TeacherHashes:
    """Return the hashes of a teacher's files, which are read in full. Raises OSError."""
    model = hashlib.sha256(weights_sha256(directory).encode())
    model.update(file_sha256(directory / "config.json").encode())
    if (directory / HEADS_FILE).exists():  # pooling and prefix
        model.update(file_sha256(directory / HEADS_FILE).encode())
    tokenizer = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        if path.suffix in (".json", ".txt", ".model") and path.stem.lower().startswith(
            ("token", "vocab", "merges", "special", "added", "spiece", "sentencepiece", "bpe")
        ):
            tokenizer.update(f"{path.name} {file_sha256(path)}\n".encode())
    return TeacherHashes(model.hexdigest(), tokenizer.hexdigest())


def signal_file(
    cache_dir: Path,
    teacher: TeacherFiles,
    hashes: TeacherHashes,
    corpus: Corpus,
    *,
    precision: str,
    tap: Sequence[int],
) -> SignalFile:
    """Return the cache file for the outputs of this teacher on this corpus."""
    outputs = {name: list(order) for name, order in teacher.columns.items()}
    if tap:
        outputs[TAPPED] = list(tap)
    identity = SignalIdentity(
        teacher_sha256=hashes.model,
        tokenizer_sha256=hashes.tokenizer,
        text_sha256=_text_sha256(corpus.rows.texts),
        max_length=teacher.max_length,
        precision=precision,
        outputs=outputs,
    )
    key = [str(teacher.directory), sorted(outputs), [s.name for s in corpus.sources]]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    dataset = corpus.sources[0].name.replace("/", "-")
    return SignalFile(cache_dir / f"{dataset}-{name}.safetensors", identity)


def _sha256(outputs: Mapping[str, Tensor]) -> str:
    """Return a hash of the names, types, shapes and values of cached outputs."""
    digest = hashlib.sha256()
    for name, values in sorted(outputs.items()):
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _difference(cached: SignalIdentity, current: SignalIdentity) -> str | None:
    """Return a description of the first field that differs, or None."""
    for field, what in (
        ("teacher_sha256", "the hash of the teacher's weights"),
        ("tokenizer_sha256", "the hash of the teacher's tokenizer"),
        ("text_sha256", "the hash of the texts"),
        ("max_length", "the truncation"),
        ("precision", "the precision"),
        ("outputs", "the set of heads, classes or layers"),
    ):
        before, after = getattr(cached, field), getattr(current, field)
        if before != after:
            return f"{what} was {_short(before)}, now it is {_short(after)}"
    return None


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 24 else text[:12]


def _text_sha256(texts: Sequence[Text]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        for part in strings_of(text):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
