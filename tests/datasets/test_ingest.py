"""Valid uploads in every format, and the dataset that is stored."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.shared.datasets.card import Head, HeadType, Split
from services.shared.datasets.stored_card import read_card
from services.shared.datasets.upload import Format, Layout

if TYPE_CHECKING:
    from tests.datasets.conftest import Ingestor, JsonLines

TWO_HEADS = Layout.model_validate(
    {
        "text_column": "review",
        "heads": [
            {"name": "mood", "column": "feeling"},
            {"name": "topics", "type": "multi_label"},
        ],
    }
)
ROWS: list[dict[str, Any]] = [
    {
        "review": f'第{n}篇 review, "quoted"\nand long',
        "feeling": ("glad", "sad", None)[n % 3],
        "topics": (["food", "price"], [], None, ["food"])[n % 4],
    }
    for n in range(60)
]


def _as_jsonl() -> bytes:
    return "\n".join(
        json.dumps(row, ensure_ascii=n % 2 == 0) for n, row in enumerate(ROWS)
    ).encode()


def _as_csv() -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["feeling", "review", "topics"])
    for row in ROWS:
        topics = row["topics"]
        joined = "" if topics is None else "|".join(topics) or "|"
        writer.writerow([row["feeling"] or "", row["review"], joined])
    return text.getvalue().encode()


def _as_csv_with_bom() -> bytes:
    return b"\xef\xbb\xbf" + _as_csv()


def _as_parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("write", "format"),
    [
        (_as_jsonl, Format.JSONL),
        (_as_csv, Format.CSV),
        (_as_csv_with_bom, Format.CSV),
        (_as_parquet, Format.PARQUET),
    ],
)
def test_every_format_stores_the_same_rows(
    ingestor: Ingestor, write: Callable[[], bytes], format: Format
) -> None:
    card = ingestor.ingest(write(), format=format, layout=TWO_HEADS)
    assert card.heads == [
        Head(name="mood", labels=["glad", "sad"]),
        Head(name="topics", type=HeadType.MULTI_LABEL, labels=["food", "price"]),
    ]
    stored = ingestor.all_stored()
    assert [(row["text"], row["mood"], row["topics"]) for row in stored] == [
        (
            row["review"],
            {"glad": 0, "sad": 1, None: None}[row["feeling"]],
            None if row["topics"] is None else [["food", "price"].index(t) for t in row["topics"]],
        )
        for row in ROWS
    ]
    assert card.label_counts == {
        "mood": {"glad": 20, "sad": 20},
        "topics": {"food": 30, "price": 15},
    }
    assert card.missing_labels == {"mood": 20, "topics": 15}
    assert sum(card.rows.values()) == 60


def test_the_card_is_stored_with_the_splits(ingestor: Ingestor, jsonl: JsonLines) -> None:
    card = ingestor.ingest(jsonl())
    assert read_card(ingestor.datasets_dir / "ds_1") == card
    assert card.sha256 == hashlib.sha256(jsonl()).hexdigest()
    assert {split: len(ingestor.stored(split)) for split in Split} == card.rows
    assert [path.name for path in ingestor.datasets_dir.iterdir()] == ["ds_1"]


def test_line_numbers_refer_to_the_upload(ingestor: Ingestor) -> None:
    rows = 'text,mood\n"two\nlines",glad\n\nthree,sad\n' + "".join(
        f"more {n},{('glad', 'sad')[n % 2]}\n" for n in range(40)
    )
    ingestor.ingest(rows.encode(), format=Format.CSV)
    lines = {row["text"]: row["line"] for row in ingestor.all_stored()}
    assert (lines["two\nlines"], lines["three"], lines["more 0"]) == (2, 5, 6)


def test_labels_are_read_from_a_map(ingestor: Ingestor, jsonl: JsonLines) -> None:
    rows = [{"text": f"m {n}", "labels": {"mood": ("glad", "sad")[n % 2]}} for n in range(40)]
    card = ingestor.ingest(jsonl(*rows, valid=0))
    assert card.label_counts == {"mood": {"glad": 20, "sad": 20}}


@pytest.mark.parametrize("kind", ["struct", "map"])
def test_labels_are_read_from_a_parquet_map_or_struct(ingestor: Ingestor, kind: str) -> None:
    moods = [("glad", "sad")[n % 2] for n in range(40)]
    types = {
        "struct": pa.struct([("mood", pa.string())]),
        "map": pa.map_(pa.string(), pa.string()),
    }
    values = {"struct": [{"mood": m} for m in moods], "map": [[("mood", m)] for m in moods]}
    table = pa.table(
        {
            "text": [f"m {n}" for n in range(40)],
            "labels": pa.array(values[kind], type=types[kind]),
        }
    )
    file = io.BytesIO()
    pq.write_table(table, file)
    assert ingestor.ingest(file.getvalue(), format=Format.PARQUET).missing_labels == {"mood": 0}


def test_labels_are_read_from_a_json_map_in_csv(ingestor: Ingestor) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["text", "labels"])
    for n in range(40):
        writer.writerow([f"m {n}", json.dumps({"mood": ("glad", "sad")[n % 2]})])
    assert ingestor.ingest(text.getvalue().encode(), format=Format.CSV).missing_labels == {
        "mood": 0
    }


def test_integer_labels_are_accepted_and_white_space_around_labels_is_stripped(
    ingestor: Ingestor,
) -> None:
    rows = [{"text": f"n {n}", "mood": (0, " 1 ", "1", 0)[n % 4]} for n in range(40)]
    card = ingestor.ingest("\n".join(json.dumps(row) for row in rows).encode())
    assert card.heads[0].labels == ["0", "1"]


def test_unlabelled_text_has_no_heads(ingestor: Ingestor) -> None:
    rows = "".join(json.dumps({"text": f"u {n}", "mood": 1.5}) + "\n" for n in range(5))
    card = ingestor.ingest(rows.encode(), layout=Layout())
    assert (card.heads, card.label_counts, card.missing_labels) == ([], {}, {})
    assert sum(card.rows.values()) == 5


def test_a_duplicate_row_is_dropped_with_a_warning(ingestor: Ingestor, jsonl: JsonLines) -> None:
    card = ingestor.ingest(
        jsonl({"text": " text 0\n", "mood": "glad"}, {"text": "text 1", "mood": "sad"})
    )
    assert sum(card.rows.values()) == 40
    assert card.warnings == ["2 rows duplicate an earlier row and were dropped: lines 41, 42"]
    assert [row["line"] for row in ingestor.all_stored()] == list(range(1, 41))


def test_contradicting_labels_are_kept_with_a_warning(ingestor: Ingestor, jsonl: JsonLines) -> None:
    card = ingestor.ingest(jsonl({"text": "text 0", "mood": "sad"}, {"text": "text 0"}))
    assert sum(card.rows.values()) == 42
    assert card.warnings == [
        "1 labels contradict those of an earlier row with the same text: lines 1 and 41 (mood)"
    ]


def test_no_text_occurs_in_two_splits(ingestor: Ingestor) -> None:
    forms = ("cafe\u0301 {}", " caf\u00e9 {}", "caf\u00e9 {}\n")
    rows = [
        {"text": forms[n % 3].format(n // 3), "mood": ("glad", "sad", None)[n % 3]}
        for n in range(120)
    ]
    ingestor.ingest("\n".join(json.dumps(row) for row in rows).encode())
    splits: dict[str, set[Split]] = {}
    for split in Split:
        for row in ingestor.stored(split):
            splits.setdefault(row["text"].split()[1], set()).add(split)
    assert len(splits) == 40
    assert all(len(found) == 1 for found in splits.values())


def test_a_failure_while_writing_leaves_no_files(
    ingestor: Ingestor, jsonl: JsonLines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space"):
        ingestor.ingest(jsonl())
    assert list(ingestor.datasets_dir.iterdir()) == []
