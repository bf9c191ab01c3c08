"""Uploads that are sound, in every format, and what is stored of them."""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from services.shared.datasets import ingest as ingest_module
from services.shared.datasets.card import Head, HeadType, Split
from services.shared.datasets.ingest import read_card
from services.shared.datasets.upload import Format, Layout, format_of

if TYPE_CHECKING:
    from tests.datasets.conftest import Desk

TWO_HEADS = Layout.model_validate(
    {
        "text_column": "review",
        "heads": [
            {"name": "mood", "column": "feeling"},
            {"name": "topics", "type": "multi_label"},
        ],
    }
)
ROWS = [
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
    desk: Desk, write: Callable[[], bytes], format: Format
) -> None:
    card = desk.take(write(), format=format, layout=TWO_HEADS)
    assert card.heads == [
        Head(name="mood", labels=["glad", "sad"]),
        Head(name="topics", type=HeadType.MULTI_LABEL, labels=["food", "price"]),
    ]
    stored = desk.all_stored()
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


def test_the_card_is_stored_beside_the_splits(desk: Desk, jsonl: Callable[..., bytes]) -> None:
    card = desk.take(jsonl())
    assert read_card(desk.datasets_dir / "ds_1") == card
    assert card.sha256 == hashlib.sha256(jsonl()).hexdigest()
    assert {split: len(desk.stored(split)) for split in Split} == card.rows
    assert [path.name for path in desk.datasets_dir.iterdir()] == ["ds_1"]


def test_lines_are_those_of_the_upload(desk: Desk) -> None:
    rows = 'text,mood\n"two\nlines",glad\n\nthree,sad\n' + "".join(
        f"more {n},{('glad', 'sad')[n % 2]}\n" for n in range(40)
    )
    desk.take(rows.encode(), format=Format.CSV)
    lines = {row["text"]: row["line"] for row in desk.all_stored()}
    assert (lines["two\nlines"], lines["three"], lines["more 0"]) == (2, 5, 6)


def test_labels_may_stand_in_a_map(desk: Desk, jsonl: Callable[..., bytes]) -> None:
    rows = [{"text": f"m {n}", "labels": {"mood": ("glad", "sad")[n % 2]}} for n in range(40)]
    card = desk.take(jsonl(*rows, sound=0))
    assert card.label_counts == {"mood": {"glad": 20, "sad": 20}}


@pytest.mark.parametrize("kind", ["struct", "map"])
def test_labels_may_stand_in_a_map_of_parquet(desk: Desk, kind: str) -> None:
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
    assert desk.take(file.getvalue(), format=Format.PARQUET).missing_labels == {"mood": 0}


def test_labels_may_stand_in_a_map_of_csv(desk: Desk) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["text", "labels"])
    for n in range(40):
        writer.writerow([f"m {n}", json.dumps({"mood": ("glad", "sad")[n % 2]})])
    assert desk.take(text.getvalue().encode(), format=Format.CSV).missing_labels == {"mood": 0}


def test_whole_numbers_are_labels_and_white_space_around_labels_is_not(desk: Desk) -> None:
    rows = [{"text": f"n {n}", "mood": (0, " 1 ", "1", 0)[n % 4]} for n in range(40)]
    card = desk.take("\n".join(json.dumps(row) for row in rows).encode())
    assert card.heads[0].labels == ["0", "1"]


def test_unlabelled_text_has_no_heads(desk: Desk) -> None:
    rows = "".join(json.dumps({"text": f"u {n}", "mood": 1.5}) + "\n" for n in range(5))
    card = desk.take(rows.encode(), layout=Layout())
    assert (card.heads, card.label_counts, card.missing_labels) == ([], {}, {})
    assert sum(card.rows.values()) == 5


def test_a_repeated_row_is_kept_once_and_told(desk: Desk, jsonl: Callable[..., bytes]) -> None:
    card = desk.take(
        jsonl({"text": " text 0\n", "mood": "glad"}, {"text": "text 1", "mood": "sad"})
    )
    assert sum(card.rows.values()) == 40
    assert card.warnings == ["2 rows repeat an earlier row and were left out: lines 41, 42"]
    assert [row["line"] for row in desk.all_stored()] == list(range(1, 41))


def test_contradicting_labels_are_kept_and_told(desk: Desk, jsonl: Callable[..., bytes]) -> None:
    card = desk.take(jsonl({"text": "text 0", "mood": "sad"}, {"text": "text 0"}))
    assert sum(card.rows.values()) == 42
    assert card.warnings == [
        "1 labels contradict those of the same text before: lines 1 and 41 (mood)"
    ]


def test_the_same_text_never_stands_on_two_sides(desk: Desk) -> None:
    forms = ("cafe\u0301 {}", " caf\u00e9 {}", "caf\u00e9 {}\n")
    rows = [
        {"text": forms[n % 3].format(n // 3), "mood": ("glad", "sad", None)[n % 3]}
        for n in range(120)
    ]
    desk.take("\n".join(json.dumps(row) for row in rows).encode())
    sides: dict[str, set[Split]] = {}
    for split in Split:
        for row in desk.stored(split):
            sides.setdefault(row["text"].split()[1], set()).add(split)
    assert len(sides) == 40
    assert all(len(side) == 1 for side in sides.values())


def test_a_failure_while_writing_leaves_nothing(
    desk: Desk, jsonl: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ingest_module, "sync", full)
    with pytest.raises(OSError, match="No space"):
        desk.take(jsonl())
    assert list(desk.datasets_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "format"),
    [("a.JSONL", Format.JSONL), ("b.c.csv", Format.CSV), ("x/y.parquet", Format.PARQUET)],
)
def test_a_name_tells_the_format(name: str, format: Format) -> None:
    assert format_of(name) is format


@pytest.mark.parametrize("name", ["", "reviews", "reviews.txt", ".csv", "a.csv.gz"])
def test_a_name_that_tells_no_format_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="say which format"):
        format_of(name)
