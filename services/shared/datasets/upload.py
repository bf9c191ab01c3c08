"""How an upload is to be read, and the faults that are reported when it cannot be."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from services.shared.datasets.card import HeadType
from services.shared.datasets.head_names import HEAD_NAME_PATTERN, check_head_names

COMMON_ENCODINGS = "utf-8, utf-16, gb18030, big5, shift_jis, euc_kr, cp1251, cp1252"

# Codecs that are not encodings of files; some take quadratic time.
_NOT_OF_FILES = frozenset(
    {
        "idna",
        "punycode",
        "unicode_escape",
        "raw_unicode_escape",
        "unicode-escape",
        "raw-unicode-escape",
        "undefined",
        "utf-7",
    }
)


class _UploadOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Format(str, Enum):
    """The file format of an upload; by default it is detected from the content."""

    JSONL = "jsonl"
    JSON = "json"  # one array of objects, or objects in sequence over several lines
    CSV = "csv"  # with any delimiter
    FASTTEXT = "fasttext"
    XLSX = "xlsx"
    PARQUET = "parquet"
    ARROW = "arrow"
    FOLDER = "folder"  # an archive with a folder of text files per class

    __str__ = str.__str__


class Quotes(str, Enum):
    """How a delimited table writes quotes within its fields."""

    DOUBLED = "doubled"  # "a ""quoted"" word"
    BACKSLASH = "backslash"  # "a \\"quoted\\" word"
    NONE = "none"  # quotes are ordinary characters, as in many TSV files

    __str__ = str.__str__


class HeadColumn(_UploadOptions):
    """A classification head and the column that holds its labels."""

    name: Annotated[str, Field(pattern=HEAD_NAME_PATTERN)]
    type: HeadType = HeadType.SINGLE_LABEL
    column: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="Column of the labels; defaults to the head's name."
    )
    columns: Annotated[list[Annotated[str, Field(max_length=200)]], Field(max_length=1000)] = Field(
        [],
        description="Columns of 0 and 1, one per label, which a multi_label head gathers.",
    )

    @field_validator("name", mode="before")
    @classmethod
    def _explain_name(cls, name: object) -> object:
        if isinstance(name, str) and name and re.match(HEAD_NAME_PATTERN, name) is None:
            raise ValueError(
                f"{name[:80]!r} cannot name a head: a name has up to 64 ASCII letters, digits, _ and -, and "
                f"begins with a letter. Choose one and name the column: "
                f'{{"name": "label", "column": {name[:80]!r}}}, or --head label={name[:80]}'
            )
        return name

    @model_validator(mode="after")
    def _check_columns(self) -> HeadColumn:
        if self.columns and (self.column or self.type is not HeadType.MULTI_LABEL):
            raise ValueError("columns are for a multi_label head, in place of column")
        return self

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
    text_pair_column: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None,
        description="A second text: both are joined by the tokenizer's own encoding of pairs.",
    )
    split_column: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="A column of train, validation and test, in place of fractions."
    )
    encoding: Annotated[str, Field(max_length=40)] | None = Field(
        None, description="For example gb18030 or cp1252; detected by default."
    )
    delimiter: Annotated[str, Field(min_length=1, max_length=8)] | None = Field(
        None, description="Of CSV; detected by default."
    )
    header: bool | None = Field(
        None, description="Whether a table has a header; without one, columns are column1, column2."
    )
    quotes: Quotes = Field(
        Quotes.DOUBLED, description="How quotes within fields of CSV are written."
    )
    label_separator: Annotated[str, Field(min_length=1, max_length=8)] | None = Field(
        None, description="Between the labels in a string of a multi_label head; | by default."
    )
    label_names: Annotated[dict[str, dict[str, str]], Field(max_length=64)] = Field(
        {}, description="By head: the name of each value, for example of the ids 0 and 1."
    )
    missing_labels: Annotated[list[str], Field(max_length=64)] = Field(
        [],
        description='Values that mean "no label", such as -1 or nan; the empty string always does.',
    )
    merge_labels: bool = Field(
        False,
        description="Read labels that differ only in case, width or invisible characters as one.",
    )
    on_bad_rows: Literal["reject", "skip"] = Field(
        "reject", description="Whether a row with a fault rejects the upload or is left out."
    )
    on_long_texts: Literal["reject", "truncate"] = Field(
        "reject", description="What becomes of a text of more than 1,000,000 characters."
    )
    on_control_characters: Literal["reject", "remove"] = Field(
        "reject",
        description="What becomes of control characters in a text, which /predict refuses too.",
    )

    @model_validator(mode="after")
    def _check_head_names(self) -> Layout:
        check_head_names([head.name for head in self.heads])
        unknown = set(self.label_names) - {head.name for head in self.heads}
        if unknown:
            raise ValueError(f"label_names: {sorted(unknown)[0]!r} is not one of the heads")
        if self.text_pair_column == self.text_column:
            raise ValueError(
                f"text_pair_column: {self.text_column!r} is the text_column; a pair has two columns"
            )
        return self

    @field_validator("encoding")
    @classmethod
    def _check_encoding(cls, name: str | None) -> str | None:
        if name is None:
            return None
        try:
            info = codecs.lookup(name)
        except (LookupError, ValueError):
            info = None
        is_text = info is not None and getattr(info, "_is_text_encoding", True)
        if info is None or not is_text or info.name in _NOT_OF_FILES:
            raise ValueError(f"{name!r} is no text encoding; common ones: {COMMON_ENCODINGS}")
        return info.name

    def columns(self) -> list[str]:
        """Return the columns that may be needed, the text columns first, each once."""
        columns = [self.text_column]
        columns += [self.text_pair_column] if self.text_pair_column else []
        for head in self.heads:
            columns += head.columns or [head.label_column]
        columns += [self.labels_column] if self.heads else []
        columns += [self.split_column] if self.split_column else []
        return list(dict.fromkeys(columns))


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


class FatalFault(Fault):
    """A fault after which the rest of the upload cannot be read, so that its row cannot be skipped."""


class DatasetRejected(ValueError):
    """An upload with faults: the first of them in `faults`, the number of all in `total`.

    `found` says what was detected in the upload, and `command` how to send it again.
    """

    def __init__(
        self, faults: Sequence[Fault], total: int, *, found: str = "", command: str = ""
    ) -> None:
        more = f" (and {total - len(faults)} more)" if total > len(faults) else ""
        super().__init__("; ".join(str(fault) for fault in faults) + more)
        self.faults = list(faults)
        self.total = total
        self.found = found
        self.command = command
