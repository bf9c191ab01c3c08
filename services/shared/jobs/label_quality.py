"""What a finished teacher job says of its labels: likely wrong ones, duplicates and contradictions."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class RowReference(_Part):
    """A row of the dataset."""

    split: str
    line: int  # of the upload


class SuspectLabel(RowReference):
    """A label that is likely wrong.

    A model that was not trained on the text prefers `suggested`; `score` is the probability that it gives to
    `given`, and the lowest come first.
    """

    head: str
    text: str  # its first 200 characters
    given: list[str]
    suggested: list[str]
    score: float
    suggested_score: float
    basis: Literal["out_of_fold_baseline", "trained_model"]


class HeadQuality(_Part):
    """How many labels of a head were examined, and how many are likely wrong."""

    out_of_fold_texts: int  # training texts, by a baseline that was trained on the other folds
    model_texts: int  # validation and test texts, by the trained model
    suspects: int


class Duplicate(_Part):
    """Texts of different splits that are equal but for case, width, punctuation and white space."""

    text: str
    rows: list[RowReference]


class Contradiction(_Part):
    """Rows whose texts are equal in the same sense, and whose labels differ."""

    head: str
    text: str
    rows: list[RowReference]
    labels: list[list[str]]  # of each row


class LabelQuality(_Part):
    """The labels of a dataset after training; each list holds the first entries, the counts are of all."""

    heads: dict[str, HeadQuality]
    suspects: list[SuspectLabel]
    num_duplicates: int
    duplicates: list[Duplicate]
    num_contradictions: int
    contradictions: list[Contradiction]
