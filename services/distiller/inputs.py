"""The inputs of a distillation: texts and labels, tokenised for the student and for the teacher."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from services.distiller.corpus import Corpus, CorpusReader, open_corpus
from services.shared.datasets.card import DatasetCard, Head, HeadType, Split
from services.shared.datasets.stored_card import read_card
from services.shared.jobs.run_directory import RunInput
from services.shared.model.mapped_arrays import DirectoryWriter
from services.shared.model.metrics import Array
from services.shared.model.tokens import Rows, TokenisedSplit
from services.shared.training.shared_data import SharedData


@dataclass(frozen=True)
class Reader:
    """How one of the two models reads texts."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    prefix: str


@dataclass(frozen=True)
class TokenisedPair:
    """One corpus tokenised for the student and for the teacher; row i of both is the same text."""

    corpus: Corpus
    student: TokenisedSplit
    teacher: TokenisedSplit


@dataclass(frozen=True)
class DistillationData:
    """The texts and labels that a distillation trains and evaluates on."""

    card: DatasetCard
    heads: list[Head]
    train: TokenisedPair
    validation: TokenisedPair
    evaluation: TokenisedPair  # student against teacher: the test split, or validation without one
    evaluation_split: Split
    num_unlabelled: int  # training texts without labels
    num_duplicates: int  # unlabelled texts skipped as duplicates

    @property
    def fits_thresholds(self) -> bool:
        """Return whether a head needs thresholds and there are validation texts to fit them on."""
        multi_label = any(head.type is HeadType.MULTI_LABEL for head in self.heads)
        return multi_label and len(self.validation.corpus) > 0

    @property
    def lengths(self) -> Array:
        """Return the tokens [N] of each training text, by the tokenizer that needs more."""
        return np.maximum(self.train.student.lengths, self.train.teacher.lengths)


def read_data(
    task: RunInput,
    shared: SharedData,
    heads: list[Head],
    *,
    student: Reader,
    teacher: Reader,
) -> DistillationData:
    """Return all texts, tokenised once a node for each of both models. Raises ValueError. Collective."""
    card = read_card(task.dataset_dir)

    def read(split: Split, unlabelled: Sequence[Path] = ()) -> TokenisedPair:
        def chunks(writer: DirectoryWriter) -> Iterator[Rows]:
            reader = CorpusReader(task.dataset_dir, split, heads, unlabelled=unlabelled)
            yield from reader
            writer.values |= reader.values()

        directory, rows = shared.rows(
            str(split),
            chunks,
            heads=heads,
            kind=card.text_kind,
            source=[task.dataset_dir, *unlabelled],
        )
        ours, theirs = (
            shared.tokens(
                directory,
                rows,
                reader.tokenizer,
                max_length=reader.max_length,
                prefix=reader.prefix,
            )
            for reader in (student, teacher)
        )
        return TokenisedPair(open_corpus(directory, rows), ours, theirs)

    train = read(Split.TRAIN, task.unlabelled_dirs)
    num_labelled = train.corpus.num_labelled
    if not num_labelled:
        raise ValueError("the dataset has no training texts")
    validation, test = read(Split.VALIDATION), read(Split.TEST)
    has_test = len(test.corpus) > 0
    return DistillationData(
        card=card,
        heads=heads,
        train=train,
        validation=validation,
        evaluation=test if has_test else validation,
        evaluation_split=Split.TEST if has_test else Split.VALIDATION,
        num_unlabelled=len(train.corpus) - num_labelled,
        num_duplicates=train.corpus.num_duplicates,
    )
