"""The inputs of a distillation: texts and labels, tokenised for the student and for the teacher."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from services.distiller.corpus import Corpus, add_unlabelled, read_corpus
from services.shared.datasets.card import DatasetCard, Head, HeadType, Split
from services.shared.datasets.stored_card import read_card
from services.shared.jobs.run_directory import RunInput
from services.shared.model.metrics import Array
from services.shared.model.tokens import Rows, TokenisedSplit, tokenise


@dataclass(frozen=True)
class Reader:
    """How one of the two models reads texts."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    prefix: str

    def tokenise(self, rows: Rows) -> TokenisedSplit:
        """Return tokenised texts."""
        return tokenise(rows, self.tokenizer, max_length=self.max_length, prefix=self.prefix)


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
    heads: list[Head],
    *,
    student: Reader,
    teacher: Reader,
) -> DistillationData:
    """Read all texts and tokenise them for both models. Raises ValueError."""
    splits = {split: read_corpus(task.dataset_dir, split, heads) for split in Split}
    num_labelled = len(splits[Split.TRAIN])
    if not num_labelled:
        raise ValueError("the dataset has no training texts")
    train, num_duplicates = add_unlabelled(
        splits[Split.TRAIN],
        task.unlabelled_dirs,
        held_out=[splits[Split.VALIDATION], splits[Split.TEST]],
        heads=heads,
    )

    def tokenise_pair(corpus: Corpus) -> TokenisedPair:
        ours = student.tokenise(corpus.rows)
        # Equal where the same tokenizer object is used in the same way.
        theirs = ours if teacher == student else teacher.tokenise(corpus.rows)
        return TokenisedPair(corpus, ours, theirs)

    validation = tokenise_pair(splits[Split.VALIDATION])
    has_test = len(splits[Split.TEST]) > 0
    return DistillationData(
        card=read_card(task.dataset_dir),
        heads=heads,
        train=tokenise_pair(train),
        validation=validation,
        evaluation=tokenise_pair(splits[Split.TEST]) if has_test else validation,
        evaluation_split=Split.TEST if has_test else Split.VALIDATION,
        num_unlabelled=len(train) - num_labelled,
        num_duplicates=num_duplicates,
    )
