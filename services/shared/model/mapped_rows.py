"""Texts, labels and tokens of a split in mapped files: written once by one rank of a node, opened by all.

Legend: N texts, C classes of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from services.shared.datasets.card import Head, HeadType
from services.shared.datasets.text import TextKind
from services.shared.model.mapped_arrays import (
    ArrayDirectory,
    DirectoryWriter,
    MappedTexts,
    TextWriter,
)
from services.shared.model.tokens import CHUNK_TEXTS, Rows, TokenisedSplit, encode

Report = Callable[[int, int], None]  # texts done, texts in all


def write_rows(
    writer: DirectoryWriter, chunks: Iterable[Rows], heads: Sequence[Head], kind: TextKind
) -> None:
    """Write texts, lines and labels. Raises OSError, and what `chunks` raises."""
    texts = TextWriter(writer, kind)
    lines = writer.array("lines", "<i8")
    labels = {
        head.name: writer.array(f"labels.{head.name}", "<i4")
        if head.type is HeadType.SINGLE_LABEL
        else writer.array(f"labels.{head.name}", "<f4", columns=len(head.labels))
        for head in heads
    }
    for rows in chunks:
        texts.append(rows.texts)
        lines.append(rows.lines)
        for name, values in rows.labels.items():
            labels[name].append(values)


def open_rows(directory: Path, heads: Sequence[Head]) -> Rows:
    """Return the rows that `write_rows` has written to a directory."""
    arrays = ArrayDirectory(directory)
    return Rows(
        texts=MappedTexts(arrays),
        lines=arrays.array("lines"),
        labels={head.name: arrays.array(f"labels.{head.name}") for head in heads},
    )


def write_tokens(
    writer: DirectoryWriter,
    rows: Rows,
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    prefix: str,
    report: Report,
) -> None:
    """Tokenise the texts of rows and write their tokens. Raises ValueError and OSError."""
    flat, ends = writer.array("tokens", "<i4"), writer.array("ends", "<i8")
    position = truncated = 0
    for start in range(0, len(rows), CHUNK_TEXTS):
        texts = rows.texts[start : start + CHUNK_TEXTS]
        tokens, cut = encode(texts, tokenizer, max_length=max_length, prefix=prefix)
        sizes = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
        chained = itertools.chain.from_iterable(tokens)
        flat.append(np.fromiter(chained, dtype=np.int32, count=int(sizes.sum())))
        ends.append(position + np.cumsum(sizes))
        position += int(sizes.sum())
        truncated += sum(cut)
        report(start + len(tokens), len(rows))
    writer.values["truncated"] = truncated


def open_tokens(directory: Path, rows: Rows) -> TokenisedSplit:
    """Return the tokens that `write_tokens` has made of rows."""
    arrays = ArrayDirectory(directory)
    offsets = np.concatenate([np.zeros(1, np.int64), arrays.array("ends")])
    truncated = int(arrays.meta.values["truncated"])
    return TokenisedSplit(
        arrays.array("tokens"), offsets, rows.lines, rows.labels, truncated=truncated
    )
