"""The texts of a distillation: labelled ones, and unlabelled ones that only the teacher answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from services.shared.datasets.card import DatasetCard, Head, HeadType, Split
from services.shared.datasets.ingest import read_card
from services.shared.datasets.split import text_key
from services.shared.jobs.run_directory import RunInput
from services.shared.model.metrics import MISSING, Array, labelled
from services.shared.model.tokens import Rows, TokenisedSplit, read_rows, tokenise


@dataclass(frozen=True)
class Source:
    """Texts that came from one file: rows [start, stop) of a corpus."""

    name: str  # "<dataset id>/<split>"
    start: int
    stop: int


@dataclass(frozen=True)
class Corpus:
    """Texts with labels where there are any, and where each text came from."""

    rows: Rows
    sources: tuple[Source, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def origin(self, row: int) -> str:
        """Return where a person finds a text: "line 12 of ds_1/train"."""
        source = next(s for s in self.sources if s.start <= row < s.stop)
        return f"line {self.rows.lines[row]} of {source.name}"

    def labelled_shares(self, heads: Sequence[Head]) -> dict[str, float]:
        """Return the share of all texts that carry a label, by head."""
        return {
            head.name: float(labelled(head, self.rows.labels[head.name]).mean()) for head in heads
        }


@dataclass(frozen=True)
class Sides:
    """One corpus as teacher and student read it: each tokenises by itself, row by row the same."""

    corpus: Corpus
    student: TokenisedSplit
    teacher: TokenisedSplit


def read_corpus(dataset_dir: Path, split: Split, heads: Sequence[Head]) -> Corpus:
    """Read one split of the labelled dataset."""
    card = read_card(dataset_dir)
    rows = read_rows(dataset_dir, split, heads)
    return Corpus(rows, (Source(f"{card.id}/{split}", 0, len(rows)),))


def add_unlabelled(
    train: Corpus, directories: Sequence[Path], *, held_out: Sequence[Corpus], heads: Sequence[Head]
) -> tuple[Corpus, int]:
    """Append the texts of unlabelled datasets; return how many were left out as known already.

    Texts that differ only in form or outer white space count as the same. A held-out text must never
    be learnt from, and one that is labelled needs no second row. Labels are ignored, splits too.
    """
    taken = {text_key(text) for part in (train, *held_out) for text in part.rows.texts}
    texts, lines = list(train.rows.texts), list(train.rows.lines)
    sources, skipped = list(train.sources), 0
    for directory in directories:
        card: DatasetCard = read_card(directory)
        for split in Split:
            rows, start = read_rows(directory, split, []), len(texts)
            for text, line in zip(rows.texts, rows.lines, strict=True):
                key = text_key(text)
                if key in taken:
                    skipped += 1
                    continue
                taken.add(key)
                texts.append(text)
                lines.append(line)
            sources.append(Source(f"{card.id}/{split}", start, len(texts)))
    labels = {head.name: _extended(train.rows.labels[head.name], len(texts)) for head in heads}
    return Corpus(Rows(texts, np.array(lines, dtype=np.int64), labels), tuple(sources)), skipped


@dataclass(frozen=True)
class Lesson:
    """Everything that is read before a distillation begins."""

    card: DatasetCard
    heads: list[Head]
    train: Sides
    validation: Sides
    judged: Sides  # where student and teacher are compared: test, or validation without one
    judged_split: Split
    unlabelled: int  # texts without labels in train
    left_out: int  # unlabelled texts that were known already

    @property
    def fits_thresholds(self) -> bool:
        """Say whether a head answers by thresholds, and there are texts to fit them on."""
        many = any(head.type is HeadType.MULTI_LABEL for head in self.heads)
        return many and len(self.validation.corpus) > 0

    @property
    def lengths(self) -> Array:
        """Return what a training text costs: its tokens on the side where it has more."""
        return np.maximum(self.train.student.lengths, self.train.teacher.lengths)


def read_lesson(
    task: RunInput, heads: list[Head], *, student: Any, teacher: Any, teacher_max_length: int
) -> Lesson:
    """Read and tokenise all texts, with the tokenizer of each side. Raises ValueError."""
    parts = {split: read_corpus(task.dataset_dir, split, heads) for split in Split}
    held_out = [parts[Split.VALIDATION], parts[Split.TEST]]
    labelled_texts = len(parts[Split.TRAIN])
    if not labelled_texts:
        raise ValueError("the dataset has no training texts")
    train, left_out = add_unlabelled(
        parts[Split.TRAIN], task.unlabelled_dirs, held_out=held_out, heads=heads
    )

    def sides(corpus: Corpus) -> Sides:
        max_length = task.spec.training.max_length
        ours = tokenise(corpus.rows, student, max_length=max_length)
        if teacher is student and teacher_max_length == max_length:
            return Sides(corpus, ours, ours)
        return Sides(corpus, ours, tokenise(corpus.rows, teacher, max_length=teacher_max_length))

    validation = sides(parts[Split.VALIDATION])
    judged_split = Split.TEST if len(parts[Split.TEST]) else Split.VALIDATION
    return Lesson(
        card=read_card(task.dataset_dir),
        heads=heads,
        train=sides(train),
        validation=validation,
        judged=validation if judged_split is Split.VALIDATION else sides(parts[Split.TEST]),
        judged_split=judged_split,
        unlabelled=len(train) - labelled_texts,
        left_out=left_out,
    )


def _extended(labels: Array, size: int) -> Array:
    """Return labels [N] or [N, C] with missing ones appended up to `size` texts."""
    missing = np.nan if labels.ndim == 2 else MISSING
    more = np.full((size - len(labels), *labels.shape[1:]), missing, dtype=labels.dtype)
    return np.concatenate([labels, more])
