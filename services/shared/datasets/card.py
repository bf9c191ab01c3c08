"""The card of a stored dataset: `dataset.json` next to one Parquet file per split.

<datasets>/<id>/dataset.json        DatasetCard, with a SHA-256 of each file (stored_card.py)
<datasets>/<id>/{train,validation,test}.parquet
    text   string: the text, the first text of a pair, or a JSON list of chat messages
    text_pair  string: the second text; only in a dataset of pairs
    line   int64: line of the upload (JSONL, CSV; the header is line 1) or row from 1 (Parquet)
    one column per head, named as the head:
        single_label  int32, index into the head's labels, null where the label is missing
        multi_label   list<int32>, sorted indices, null where the labels are missing
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from services.shared.datasets.head_names import HEAD_NAME_PATTERN
from services.shared.datasets.text import TextKind

_MAX_LISTED = 50  # labels in a message


class HeadType(str, Enum):
    """How many labels a text may have for a head."""

    SINGLE_LABEL = "single_label"
    MULTI_LABEL = "multi_label"

    __str__ = str.__str__


class Split(str, Enum):
    """A part of a dataset; no text occurs in more than one."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"

    __str__ = str.__str__


class Head(BaseModel):
    """A classification head: one set of labels."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(pattern=HEAD_NAME_PATTERN)]
    type: HeadType = HeadType.SINGLE_LABEL
    labels: list[str]  # sorted; the index of a label is its class index everywhere


def heads_difference(student: Sequence[Head], teacher: Sequence[Head]) -> str | None:
    """Return a sentence that lists both sets of heads, or None where the teacher has every student head.

    Labels are matched by name: their order may differ.
    """
    known = {(head.name, head.type, frozenset(head.labels)) for head in teacher}
    if all((head.name, head.type, frozenset(head.labels)) in known for head in student):
        return None
    return (
        f"teacher and student heads differ: the teacher has {_listed(teacher)}; "
        f"the student has {_listed(student)}"
    )


def _listed(heads: Sequence[Head]) -> str:
    return ", ".join(f"{h.name} ({h.type}: {_some(h.labels)})" for h in heads) or "none"


def _some(labels: Sequence[str]) -> str:
    """Return the first labels; a head may have 10,000."""
    more = f", and {len(labels) - _MAX_LISTED:,} more" if len(labels) > _MAX_LISTED else ""
    return ", ".join(labels[:_MAX_LISTED]) + more


class DatasetCard(BaseModel):
    """The description of a validated dataset."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str
    name: str
    text_kind: TextKind = TextKind.SINGLE
    heads: list[Head]  # empty for unlabelled text
    rows: dict[Split, int]
    label_counts: dict[str, dict[str, int]]  # head -> label -> number of texts in all splits
    missing_labels: dict[str, int]  # head -> number of texts without a label
    warnings: list[str] = []
    sha256: str  # of the upload
