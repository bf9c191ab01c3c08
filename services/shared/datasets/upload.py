"""How an upload is to be read, and the faults that are reported when it cannot be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from pathlib import PurePath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.shared.datasets.card import HeadType
from services.shared.datasets.head_names import HEAD_NAME_PATTERN, check_head_names


class _UploadOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Format(str, Enum):
    """The file format of an upload; text is UTF-8 in all of them."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"

    __str__ = str.__str__


class HeadColumn(_UploadOptions):
    """A classification head and the column that holds its labels."""

    name: Annotated[str, Field(pattern=HEAD_NAME_PATTERN)]
    type: HeadType = HeadType.SINGLE_LABEL
    column: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="Column of the labels; defaults to the head's name."
    )

    @property
    def label_column(self) -> str:
        """Return the column that holds the labels."""
        return self.column or self.name


class SplitFractions(_UploadOptions):
    """Fractions of the texts in each split; a hash of the text decides which split it goes to."""

    train: Annotated[float, Field(gt=0, le=1)] = 0.8
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1
    test: Annotated[float, Field(ge=0, lt=1)] = 0.1

    @model_validator(mode="after")
    def _sum_to_one(self) -> SplitFractions:
        total = self.train + self.validation + self.test
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise ValueError(f"train, validation and test must sum to 1, not to {total:g}")
        return self


class Layout(_UploadOptions):
    """Which columns of a row hold the text and the labels.

    The labels of a head are read from the head's column, or else from the entry with the head's name
    in the map in `labels_column`. Without heads, the text is unlabelled.
    """

    text_column: Annotated[str, Field(min_length=1, max_length=200)] = "text"
    labels_column: Annotated[str, Field(min_length=1, max_length=200)] = "labels"
    heads: Annotated[list[HeadColumn], Field(max_length=64)] = []
    fractions: SplitFractions = SplitFractions()

    @model_validator(mode="after")
    def _check_head_names(self) -> Layout:
        check_head_names([head.name for head in self.heads])
        return self

    def columns(self) -> list[str]:
        """Return the columns that may be needed, the text column first, each once."""
        if not self.heads:
            return [self.text_column]
        label_columns = [head.label_column for head in self.heads]
        return list(dict.fromkeys([self.text_column, *label_columns, self.labels_column]))


class Fault(BaseModel):
    """An error in an upload that must be fixed before the dataset can be stored."""

    model_config = ConfigDict(frozen=True)

    line: int | None  # of the upload (JSONL, CSV) or row from 1 (Parquet); None: the whole upload
    field: str | None  # column or head
    message: str

    def __str__(self) -> str:
        where = [] if self.line is None else [f"line {self.line}"]
        where += [] if self.field is None else [self.field]
        return f"{', '.join(where)}: {self.message}" if where else self.message


class DatasetRejected(ValueError):
    """An upload with faults: the first of them in `faults`, the number of all in `total`."""

    def __init__(self, faults: Sequence[Fault], total: int) -> None:
        more = f" (and {total - len(faults)} more)" if total > len(faults) else ""
        super().__init__("; ".join(str(fault) for fault in faults) + more)
        self.faults = list(faults)
        self.total = total


_SUFFIXES = {
    ".jsonl": Format.JSONL,
    ".ndjson": Format.JSONL,
    ".csv": Format.CSV,
    ".parquet": Format.PARQUET,
}


def format_from_filename(filename: str) -> Format:
    """Return the format that a file name's suffix stands for; raises ValueError for any other suffix."""
    suffix = PurePath(filename).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(
            f"{filename[:200]!r} ends in none of {', '.join(_SUFFIXES)}; specify the format"
        )
    return _SUFFIXES[suffix]
