"""Statistics of a stored dataset for people: labels of each split, lengths of texts, sample rows.

A stored dataset does not change, so they are computed once. Columns are read batch by batch; counting a
million rows takes about a second and some MiB.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel

from services.shared.datasets.card import DatasetCard, Head, HeadType, Split

NUM_SAMPLES = 20  # of each split
MAX_SAMPLE_CHARACTERS = 2000
MAX_LABELS = 200  # of a head; the most frequent ones
_ROWS_PER_BATCH = 65_536


class SampleRow(BaseModel):
    """One row: its texts, cut to MAX_SAMPLE_CHARACTERS, and its labels by head."""

    line: int
    text: str
    text_pair: str | None = None
    labels: dict[str, list[str] | None]  # None: missing


class LengthBin(BaseModel):
    """How many texts have from `from_characters` to less than `to_characters`."""

    from_characters: int
    to_characters: int
    texts: int


class SplitStatistics(BaseModel):
    """One split."""

    rows: int
    labels: dict[str, dict[str, int]]  # head -> label -> texts, the most frequent first
    missing_labels: dict[str, int]
    samples: list[SampleRow]


class DatasetStatistics(BaseModel):
    """A dataset: its splits, and the lengths of all texts in bins of powers of two."""

    dataset_id: str
    splits: dict[Split, SplitStatistics]
    lengths: list[LengthBin]
    longest_characters: int
    mean_characters: float


def dataset_statistics(dataset_dir: Path, card: DatasetCard) -> DatasetStatistics:
    """Return the statistics of a stored dataset. Raises OSError."""
    lengths: Counter[int] = Counter()
    totals = [0, 0, 0]  # texts, characters, longest
    splits = {}
    for split in Split:
        path = dataset_dir / f"{split}.parquet"
        if path.exists():
            splits[split] = _split(path, card, lengths=lengths, totals=totals)
    texts, characters, longest = totals
    return DatasetStatistics(
        dataset_id=card.id,
        splits=splits,
        lengths=_bins(lengths),
        longest_characters=longest,
        mean_characters=characters / texts if texts else 0.0,
    )


def _split(
    path: Path, card: DatasetCard, *, lengths: Counter[int], totals: list[int]
) -> SplitStatistics:
    counts = {head.name: Counter[int]() for head in card.heads}
    missing = {head.name: 0 for head in card.heads}
    samples: list[SampleRow] = []
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(_ROWS_PER_BATCH):
            if len(samples) < NUM_SAMPLES:
                rows = batch.slice(0, NUM_SAMPLES - len(samples)).to_pylist()
                samples += [_sample(row, card.heads) for row in rows]
            _count_lengths(batch, lengths=lengths, totals=totals)
            for head in card.heads:
                column = batch.column(head.name)
                missing[head.name] += column.null_count
                values = pc.list_flatten(column) if head.type is HeadType.MULTI_LABEL else column
                for found in pc.value_counts(values.drop_null()).to_pylist():
                    counts[head.name][found["values"]] += found["counts"]
        num_rows = file.metadata.num_rows
    return SplitStatistics(
        rows=num_rows,
        labels={
            head.name: {
                head.labels[index]: number
                for index, number in counts[head.name].most_common(MAX_LABELS)
            }
            for head in card.heads
        },
        missing_labels=missing,
        samples=samples,
    )


def _count_lengths(batch: pa.RecordBatch, *, lengths: Counter[int], totals: list[int]) -> None:
    """Count the texts of a batch by the number of binary digits of their length."""
    characters = pc.utf8_length(batch.column("text"))
    if "text_pair" in batch.schema.names:
        characters = pc.add(characters, pc.utf8_length(batch.column("text_pair")))
    for found in pc.value_counts(characters).to_pylist():
        length, texts = found["values"], found["counts"]
        lengths[int(length).bit_length()] += texts
        totals[0] += texts
        totals[1] += length * texts
        totals[2] = max(totals[2], length)


def _bins(lengths: Counter[int]) -> list[LengthBin]:
    if not lengths:
        return []
    return [
        LengthBin(
            from_characters=1 << (digits - 1) if digits else 0,
            to_characters=1 << digits,
            texts=lengths[digits],
        )
        for digits in range(min(lengths), max(lengths) + 1)
    ]


def _sample(row: dict[str, Any], heads: list[Head]) -> SampleRow:
    pair = row.get("text_pair")
    return SampleRow(
        line=int(str(row["line"])),
        text=str(row["text"])[:MAX_SAMPLE_CHARACTERS],
        text_pair=None if pair is None else str(pair)[:MAX_SAMPLE_CHARACTERS],
        labels={head.name: _labels(head, row[head.name]) for head in heads},
    )


def _labels(head: Head, value: int | list[int] | None) -> list[str] | None:
    if value is None:
        return None
    indices = value if isinstance(value, list) else [value]
    return [head.labels[int(index)] for index in indices]
