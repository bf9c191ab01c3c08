"""Corpora outside of a job."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.distiller.corpus import Corpus, CorpusReader, open_corpus
from services.shared.datasets.card import Split
from services.shared.datasets.stored_card import read_card
from services.shared.model.mapped_arrays import new_directory
from services.shared.model.mapped_rows import open_rows, write_rows


def read_corpus(
    directory: Path, dataset_dir: Path, split: Split, *, unlabelled: Sequence[Path] = ()
) -> Corpus:
    """Return the corpus of a split, whose mapped files are in `directory`."""
    card = read_card(dataset_dir)
    reader = CorpusReader(dataset_dir, split, card.heads, unlabelled=unlabelled)
    with new_directory(directory) as writer:
        write_rows(writer, reader, card.heads, card.text_kind)
        writer.values |= reader.values()
    return open_corpus(directory, open_rows(directory, card.heads))
