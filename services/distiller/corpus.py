"""The texts of a distillation: the labelled dataset, and unlabelled datasets appended to its training split."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from services.shared.datasets.card import Head, Split
from services.shared.datasets.split import text_key
from services.shared.datasets.stored_card import read_card
from services.shared.model.mapped_arrays import ArrayDirectory
from services.shared.model.metrics import labelled_mask
from services.shared.model.tokens import Rows, iter_rows, no_labels


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
    num_duplicates: int = 0  # unlabelled texts that were left out

    @property
    def num_labelled(self) -> int:
        """Return the number of texts of the labelled dataset, which come first."""
        return self.sources[0].stop

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


class CorpusReader:
    """Yields the rows of a split of the labelled dataset, then those of unlabelled datasets.

    Of a text that occurs again only the first row is taken: texts that differ only in Unicode form or
    surrounding white space are duplicates. Held-out texts must never be trained on, and a labelled text
    needs no second row. The labels and splits of the unlabelled datasets are ignored.
    """

    def __init__(
        self,
        dataset_dir: Path,
        split: Split,
        heads: Sequence[Head],
        *,
        unlabelled: Sequence[Path] = (),
    ) -> None:
        self._dataset_dir = dataset_dir
        self._split = split
        self._heads = heads
        self._unlabelled = unlabelled
        self.sources: list[Source] = []
        self.num_duplicates = 0

    def __iter__(self) -> Iterator[Rows]:
        """Yield the rows in chunks. Raises ValueError for texts of another kind, and DamagedDataset."""
        card = read_card(self._dataset_dir)
        seen: set[bytes] = set()
        start = position = 0
        for rows in iter_rows(self._dataset_dir, self._split, self._heads):
            if self._unlabelled:
                seen.update(map(text_key, rows.texts))
            position += len(rows)
            yield rows
        self.sources.append(Source(f"{card.id}/{self._split}", start, position))
        if not self._unlabelled:
            return
        for split in set(Split) - {self._split}:
            for rows in iter_rows(self._dataset_dir, split, []):
                seen.update(map(text_key, rows.texts))
        for directory in self._unlabelled:
            other = read_card(directory)
            if other.text_kind is not card.text_kind:
                raise ValueError(
                    f"the texts of the unlabelled dataset {other.name!r} are of the kind {other.text_kind}, those "
                    f"of the labelled one {card.text_kind}"
                )
            for split in Split:
                start = position
                for rows in iter_rows(directory, split, []):
                    fresh = self._fresh(rows, seen)
                    position += len(fresh)
                    yield fresh
                self.sources.append(Source(f"{other.id}/{split}", start, position))

    def values(self) -> dict[str, int | str]:
        """Return what `open_corpus` needs beside the rows, once all rows were read."""
        sources = [[source.name, source.start, source.stop] for source in self.sources]
        return {"sources": json.dumps(sources), "duplicates": self.num_duplicates}

    def _fresh(self, rows: Rows, seen: set[bytes]) -> Rows:
        """Return the rows whose texts were not seen, without labels, and record them as seen."""
        kept = []
        for number, text in enumerate(rows.texts):
            key = text_key(text)
            if key in seen:
                self.num_duplicates += 1
            else:
                seen.add(key)
                kept.append(number)
        labels = {head.name: no_labels(head, len(kept)) for head in self._heads}
        return Rows([rows.texts[number] for number in kept], rows.lines[kept], labels)


def open_corpus(directory: Path, rows: Rows) -> Corpus:
    """Return the corpus whose rows and values were written to a directory."""
    values = ArrayDirectory(directory).meta.values
    sources = tuple(Source(*entry) for entry in json.loads(str(values["sources"])))
    return Corpus(rows, sources, int(values["duplicates"]))
