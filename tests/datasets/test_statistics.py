"""Statistics of a stored dataset agree with its rows."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.shared.datasets.card import DatasetCard, HeadType, Split
from services.shared.datasets.ingest import ingest
from services.shared.datasets.statistics import MAX_SAMPLE_CHARACTERS, dataset_statistics
from services.shared.datasets.upload import Format, HeadColumn, Layout

ROWS = [
    {
        "text": f"{number} " + "é" * (number * 7 % 40),
        "mood": None if number % 10 == 3 else ["bad", "good"][number % 3 == 0],
        "topics": [["a"], ["a", "b"], []][number % 3],
    }
    for number in range(300)
]


def stored(tmp_path: Path, rows: Sequence[Mapping[str, object]], layout: Layout) -> Path:
    upload = tmp_path / "upload.jsonl"
    upload.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    card = ingest(
        upload, format=Format.JSONL, layout=layout, id="ds_1", name="n", datasets_dir=tmp_path / "d"
    )  # fmt: skip
    (tmp_path / "card.json").write_text(card.model_dump_json())
    return tmp_path / "d" / "ds_1"


def test_labels_lengths_and_samples_are_those_of_the_rows(tmp_path: Path) -> None:
    heads = [HeadColumn(name="mood"), HeadColumn(name="topics", type=HeadType.MULTI_LABEL)]
    directory = stored(tmp_path, ROWS, Layout(heads=heads))
    card_json = json.loads((tmp_path / "card.json").read_text())
    card = DatasetCard.model_validate(card_json)
    found = dataset_statistics(directory, card)
    assert sum(split.rows for split in found.splits.values()) == len(ROWS)
    for head in ("mood", "topics"):
        totals: Counter[str] = Counter()
        for split in found.splits.values():
            totals.update(split.labels[head])
        assert totals == Counter(card.label_counts[head])
    assert sum(s.missing_labels["mood"] for s in found.splits.values()) == 30
    lengths = [len(str(row["text"])) for row in ROWS]
    assert found.longest_characters == max(lengths)
    assert found.mean_characters == sum(lengths) / len(lengths)
    for bin in found.lengths:
        expected = sum(bin.from_characters <= n < bin.to_characters for n in lengths)
        assert bin.texts == expected
    assert sum(bin.texts for bin in found.lengths) == len(ROWS)
    sample = found.splits[Split.TRAIN].samples[0]
    row = ROWS[sample.line - 1]
    assert sample.text == row["text"]
    topics = row["topics"]
    assert isinstance(topics, list)
    assert sample.labels["topics"] == sorted(topics)


def test_pairs_are_counted_together_and_long_texts_cut(tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"text": "x" * 5000, "other": "y" * 10, "label": ["a", "b"][number % 2], "n": number}
        for number in range(60)
    ]
    for number, row in enumerate(rows):
        row["text"] = f"{number}" + str(row["text"])
    layout = Layout(text_pair_column="other", heads=[HeadColumn(name="label")])
    directory = stored(tmp_path, rows, layout)
    card = DatasetCard.model_validate_json((tmp_path / "card.json").read_text())
    found = dataset_statistics(directory, card)
    assert found.longest_characters == 5012
    samples = [row for split in found.splits.values() for row in split.samples]
    assert {len(row.text) for row in samples} == {MAX_SAMPLE_CHARACTERS}
    assert {row.text_pair for row in samples} == {"y" * 10}
