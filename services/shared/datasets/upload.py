"""How an upload is to be read, and what is said when it cannot be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from pathlib import PurePath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.shared.datasets.card import HEAD_NAME, HeadType

_RESERVED = frozenset({"text", "line"})  # columns of the stored Parquet files
# Attributes of torch's ModuleDict, which holds the heads and refuses them as keys; `smart_apply` comes
# from transformers, which adds it to every module.
_TORCH_NAMES = frozenset(
    {
        "T_destination",
        "add_module",
        "apply",
        "bfloat16",
        "buffers",
        "call_super_init",
        "children",
        "clear",
        "compile",
        "cpu",
        "cuda",
        "double",
        "dump_patches",
        "eval",
        "extra_repr",
        "float",
        "forward",
        "get_buffer",
        "get_extra_state",
        "get_parameter",
        "get_submodule",
        "half",
        "ipu",
        "items",
        "keys",
        "load_state_dict",
        "modules",
        "mtia",
        "named_buffers",
        "named_children",
        "named_modules",
        "named_parameters",
        "parameters",
        "pop",
        "register_backward_hook",
        "register_buffer",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_load_state_dict_post_hook",
        "register_load_state_dict_pre_hook",
        "register_module",
        "register_parameter",
        "register_state_dict_post_hook",
        "register_state_dict_pre_hook",
        "requires_grad_",
        "set_extra_state",
        "set_submodule",
        "share_memory",
        "smart_apply",
        "state_dict",
        "to",
        "to_empty",
        "train",
        "training",
        "type",
        "update",
        "values",
        "xpu",
        "zero_grad",
    }
)


class _Declared(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Format(str, Enum):
    """How the rows of an upload are written; text is UTF-8 in all of them."""

    JSONL = "jsonl"
    CSV = "csv"
    PARQUET = "parquet"

    __str__ = str.__str__


class HeadColumn(_Declared):
    """A question and the column that answers it."""

    name: Annotated[str, Field(pattern=HEAD_NAME)]
    type: HeadType = HeadType.SINGLE_LABEL
    column: Annotated[str, Field(min_length=1, max_length=200)] | None = Field(
        None, description="Column of the label; the head's name if left out."
    )

    @property
    def source(self) -> str:
        """Return the column that holds the label."""
        return self.column or self.name


class SplitFractions(_Declared):
    """Shares of the texts; which text goes where is decided by a hash of the text."""

    train: Annotated[float, Field(gt=0, le=1)] = 0.8
    validation: Annotated[float, Field(ge=0, lt=1)] = 0.1
    test: Annotated[float, Field(ge=0, lt=1)] = 0.1

    @model_validator(mode="after")
    def _sum_to_one(self) -> SplitFractions:
        total = self.train + self.validation + self.test
        if not math.isclose(total, 1, abs_tol=1e-6):
            raise ValueError(f"train, validation and test sum to {total:g}; they have to sum to 1")
        return self


class Layout(_Declared):
    """Where text and labels stand in each row.

    The label of a head stands in the head's column, or under the head's name in a map in
    `labels_column`. No heads: unlabelled text.
    """

    text_column: Annotated[str, Field(min_length=1, max_length=200)] = "text"
    labels_column: Annotated[str, Field(min_length=1, max_length=200)] = "labels"
    heads: Annotated[list[HeadColumn], Field(max_length=64)] = []
    fractions: SplitFractions = SplitFractions()

    @model_validator(mode="after")
    def _heads_have_names_of_their_own(self) -> Layout:
        names = [head.name for head in self.heads]
        for name in names:
            if name in _RESERVED:
                raise ValueError(
                    f"heads: {name!r} names a column of every stored dataset; rename it"
                )
            if name in _TORCH_NAMES:
                raise ValueError(
                    f"heads: torch keeps the name {name!r} for itself; "
                    f'name the head otherwise and give {{"column": {name!r}}}'
                )
            if names.count(name) > 1:
                raise ValueError(f"heads: {name!r} is declared twice")
        return self

    def columns(self) -> list[str]:
        """Return every column that may matter, each once."""
        named = [self.text_column, *(head.source for head in self.heads), self.labels_column]
        return list(dict.fromkeys(named if self.heads else named[:1]))


class Fault(BaseModel):
    """Something in an upload that has to be mended before it can be stored."""

    model_config = ConfigDict(frozen=True)

    line: int | None  # of the upload (JSONL, CSV) or row from 1 (Parquet); None: the whole of it
    field: str | None  # column or head
    message: str

    def __str__(self) -> str:
        where = [] if self.line is None else [f"line {self.line}"]
        where += [] if self.field is None else [self.field]
        return f"{', '.join(where)}: {self.message}" if where else self.message


class DatasetRejected(ValueError):
    """An upload with faults: the first of them, and how many there are in all."""

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


def format_of(filename: str) -> Format:
    """Return the format that a file's name tells; raises ValueError for any other name."""
    suffix = PurePath(filename).suffix.lower()
    if suffix not in _SUFFIXES:
        raise ValueError(
            f"{filename[:200]!r}: the name ends in none of {', '.join(_SUFFIXES)}; "
            "say which format it is"
        )
    return _SUFFIXES[suffix]
