"""The texts of a distillation: the labelled dataset, and unlabelled datasets appended to its training split."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from services.shared.datasets.card import Head, Split
from services.shared.datasets.split import text_key
from services.shared.datasets.stored_card import read_card
from services.shared.datasets.text import kind_of
from services.shared.model.metrics import MISSING, Array, labelled_mask
from services.shared.model.tokens import Rows, read_rows


@dataclass(frozen=True)
class Source:
    """The rows [start, stop) of a corpus that were read from one file."""

    name: str  # "<dataset id>/<split>"
    start: int
    stop: int


@dataclass(frozen=True)
class Corpus:
    """Texts, their labels where they have any, and the file each text was read from."""

    rows: Rows
    sources: tuple[Source, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def origin(self, row: int) -> str:
        """Return where a text was read from: "line 12 of ds_1/train"."""
        source = next(s for s in self.sources if s.start <= row < s.stop)
        return f"line {self.rows.lines[row]} of {source.name}"

    def labelled_shares(self, heads: Sequence[Head]) -> dict[str, float]:
        """Return the share of all texts that carry a label, by head."""
        return {
            head.name: float(labelled_mask(head, self.rows.labels[head.name]).mean())
            for head in heads
        }


def read_corpus(dataset_dir: Path, split: Split, heads: Sequence[Head]) -> Corpus:
    """Read one split of the labelled dataset."""
    card = read_card(dataset_dir)
    rows = read_rows(dataset_dir, split, heads)
    return Corpus(rows, (Source(f"{card.id}/{split}", 0, len(rows)),))


def add_unlabelled(
    train: Corpus, directories: Sequence[Path], *, held_out: Sequence[Corpus], heads: Sequence[Head]
) -> tuple[Corpus, int]:
    """Append the texts of unlabelled datasets; return the corpus and the number of duplicates skipped.

    Texts that differ only in Unicode form or surrounding white space are duplicates. Held-out texts
    must never be trained on, and a labelled text needs no second row. The labels and splits of the
    unlabelled datasets are ignored. Raises ValueError for texts of another kind.
    """
    seen = {text_key(text) for part in (train, *held_out) for text in part.rows.texts}
    texts, lines = list(train.rows.texts), list(train.rows.lines)
    sources, duplicates = list(train.sources), 0
    for directory in directories:
        card = read_card(directory)
        if card.text_kind is not kind_of(texts[0]):
            raise ValueError(
                f"the texts of the unlabelled dataset {card.name!r} are of the kind {card.text_kind}, those of "
                f"the labelled one {kind_of(texts[0])}"
            )
        for split in Split:
            rows, start = read_rows(directory, split, []), len(texts)
            for text, line in zip(rows.texts, rows.lines, strict=True):
                key = text_key(text)
                if key in seen:
                    duplicates += 1
                    continue
                seen.add(key)
                texts.append(text)
                lines.append(line)
            sources.append(Source(f"{card.id}/{split}", start, len(texts)))
    labels = {head.name: _padded(train.rows.labels[head.name], len(texts)) for head in heads}
    return Corpus(Rows(texts, np.array(lines, dtype=np.int64), labels), tuple(sources)), duplicates


def _padded(labels: Array, size: int) -> Array:
    """Return labels [N] or [N, C] with missing labels appended up to `size` texts."""
    missing = np.nan if labels.ndim == 2 else MISSING
    more = np.full((size - len(labels), *labels.shape[1:]), missing, dtype=labels.dtype)
    return np.concatenate([labels, more])
