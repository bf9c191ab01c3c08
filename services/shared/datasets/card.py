"""What a stored dataset is: `dataset.json` beside one Parquet file a split.

<datasets>/<id>/dataset.json        DatasetCard
<datasets>/<id>/{train,validation,test}.parquet
    text   string
    line   int64: line of the upload (JSONL, CSV; the header is line 1) or row from 1 (Parquet)
    one column per head, named as the head:
        single_label  int32, index into the head's labels, null where the label is missing
        multi_label   list<int32>, sorted indices, null where the labels are missing
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class HeadType(str, Enum):
    """How many labels a text may have."""

    SINGLE_LABEL = "single_label"
    MULTI_LABEL = "multi_label"

    __str__ = str.__str__


class Split(str, Enum):
    """A part of a dataset; the same text never stands in two."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"

    __str__ = str.__str__


HEAD_NAME = r"^[A-Za-z][A-Za-z0-9_-]{0,63}$"


class Head(BaseModel):
    """One question asked of each text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=HEAD_NAME)]
    type: HeadType = HeadType.SINGLE_LABEL
    labels: list[str]  # sorted; the index is the class number everywhere


class DatasetCard(BaseModel):
    """The description of a validated dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    name: str
    heads: list[Head]  # empty for unlabelled text
    rows: dict[Split, int]
    label_counts: dict[str, dict[str, int]]  # head -> label -> texts over all splits
    missing_labels: dict[str, int]  # head -> texts without a label
    warnings: list[str] = []
    sha256: str  # of the upload
