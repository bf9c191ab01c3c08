"""A preview completes the options by what the columns suggest, and its command is accepted."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from services.cli.commands import datasets
from services.cli.upload_form import parse_head
from services.shared.datasets.card import HeadType, Split
from services.shared.datasets.formats.source import DetectedLayout
from services.shared.datasets.ingest import ingest
from services.shared.datasets.preview import Preview, preview
from services.shared.datasets.profile import Profile
from services.shared.datasets.upload import Layout
from tests.datasets.shapes import MOODS, TEXTS, jsonl, parquet, rows, table

FILE = "a file.csv"


def _preview(directory: Path, content: bytes, **options: Any) -> Preview:
    upload = directory / "upload"
    upload.write_bytes(content)
    return preview(upload, layout=Layout.model_validate(options), filename=FILE)


def _options(shown: Preview) -> str:
    prefix = "stillhouse datasets add 'a file.csv'"
    assert shown.command.startswith(prefix)
    return shown.command[len(prefix) :].strip()


@pytest.mark.parametrize(
    ("content", "options"),
    [
        (jsonl(rows()), "--head mood"),
        (table(rows(label=(0, 1), name=MOODS)).encode(), "--head name"),
        (table(rows(kind=(0, 1), name=MOODS)).encode(), "--head name"),
        (
            table([{"review": t, "mood": MOODS[n % 2]} for n, t in enumerate(TEXTS)]).encode(),
            "--text-column review --head mood",
        ),
        (
            table(rows(), header=False).encode(),
            "--text-column column1 --head column2 --no-header",
        ),
        (
            jsonl(rows(mood=MOODS, split=("train", "dev", "test"))),
            "--head mood --split-column split",
        ),
        (
            table(rows(a=(0, 1), b=(1, 0, 0), c=(0, 0, 1, 1))).encode(),
            "--head labels:multi_label=a,b,c",
        ),
        (jsonl(rows(topics=(["a"], ["a", "b"]))), "--head topics:multi_label"),
        (table(rows(topics=("a", "a|b", "b"))).encode(), "--head topics:multi_label"),
        (jsonl(rows(情感=MOODS)), "--head label=情感"),
        (table(rows(), ";", index=True).encode(), "--head mood"),
    ],
    ids=range(11),
)
def test_the_command_follows_from_the_columns(tmp_path: Path, content: bytes, options: str) -> None:
    shown = _preview(tmp_path, content)
    assert shlex.split(_options(shown)) == shlex.split(options)


def test_the_options_of_the_command_store_what_the_preview_showed(tmp_path: Path) -> None:
    content = table(rows(), header=False).encode()
    shown = _preview(tmp_path, content)
    words = shlex.split(_options(shown))
    assert words[-1] == "--no-header"
    layout = Layout.model_validate(
        {"text_column": words[1], "heads": [parse_head(words[3])], "header": False}
    )
    card = ingest(
        tmp_path / "upload", layout=layout, id="ds_1", name="x", datasets_dir=tmp_path / "datasets"
    )
    assert shown.acceptable
    assert (shown.rows, shown.label_counts) == (card.rows, card.label_counts)


def test_a_declared_head_keeps_its_name(tmp_path: Path) -> None:
    content = table(rows(), header=False).encode()
    shown = _preview(tmp_path, content, heads=[{"name": "feeling"}])
    options = "--text-column column1 --head feeling=column2 --no-header"
    assert _options(shown) == options


def test_rows_duplicates_and_faults_are_counted(tmp_path: Path) -> None:
    content = jsonl([*rows(), rows()[0], {"text": "", "mood": "good"}])
    shown = _preview(tmp_path, content, heads=[{"name": "mood"}])
    assert (shown.examined_rows, shown.num_duplicates, shown.total_faults) == (41, 1, 1)
    assert not shown.acceptable
    assert shown.faults[0].line == 42
    skipped = _preview(tmp_path, content, heads=[{"name": "mood"}], on_bad_rows="skip")
    assert (skipped.acceptable, skipped.num_left_out) == (True, 1)
    assert _options(skipped) == "--head mood --skip-bad-rows"


def test_first_rows_are_cut(tmp_path: Path) -> None:
    shown = _preview(tmp_path, jsonl([{"text": "a" * 5000, "mood": {"x": [1]}}, *rows()]))
    assert len(shown.first_rows) == 5
    assert shown.first_rows[0] == {"text": "a" * 200, "mood": '{"x": [1]}'}


def test_ten_thousand_labels_are_stored_and_fifty_are_shown(tmp_path: Path) -> None:
    texts = [f"text number {n}" for n in range(20_000)]
    content = parquet(
        pa.table({"text": texts, "mood": [f"class {n % 10_000}" for n in range(20_000)]})
    )
    layout = {"heads": [{"name": "mood"}]}
    shown = _preview(tmp_path, content, **layout)
    assert shown.acceptable
    assert len(shown.label_counts["mood"]) == 50
    assert len(shown.model_dump_json()) < 20_000
    card = ingest(
        tmp_path / "upload",
        layout=Layout.model_validate(layout),
        id="ds_1",
        name="x",
        datasets_dir=tmp_path / "datasets",
    )
    assert len(card.heads[0].labels) == 10_000
    assert sum(card.rows.values()) == 20_000


def test_stated_splits_are_kept(tmp_path: Path) -> None:
    content = jsonl(rows(mood=MOODS, fold=("Train", "train", "VAL", "test")))
    shown = _preview(tmp_path, content, heads=[{"name": "mood"}], split_column="fold")
    assert shown.rows == {Split.TRAIN: 20, Split.VALIDATION: 10, Split.TEST: 10}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoding": "klingon"}, "'klingon' is no text encoding"),
        ({"encoding": "idna"}, "'idna' is no text encoding"),
        ({"encoding": "base64"}, "'base64' is no text encoding"),
        ({"text_pair_column": "text"}, "a pair has two columns"),
        ({"label_names": {"mood": {"0": "a"}}}, "'mood' is not one of the heads"),
        ({"heads": [{"name": "情感"}]}, "or --head label=情感"),
        ({"heads": [{"name": "a", "columns": ["b"]}]}, "columns are for a multi_label head"),
    ],
)
def test_an_option_that_cannot_be_met_is_explained(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Layout.model_validate(options)


def test_every_option_of_a_suggested_command_exists() -> None:
    help_text = CliRunner().invoke(datasets.app, ["add", "--help"], env={"COLUMNS": "200"}).output
    suggested = Layout.model_validate(
        {
            "text_column": "review",
            "heads": [{"name": "mood", "type": HeadType.MULTI_LABEL, "column": "x"}],
            "split_column": "fold",
            "encoding": "gbk",
            "delimiter": ";",
            "header": False,
            "quotes": "none",
            "label_separator": ";",
            "missing_labels": ["-1"],
            "merge_labels": True,
            "on_bad_rows": "skip",
            "on_long_texts": "truncate",
        }
    )
    detected = DetectedLayout.model_validate({"format": "csv"})
    profile = Profile(detected, suggested, suggested, [])
    options = [word for word in profile.options() if word.startswith("--")]
    assert len(options) == 12
    for option in options:
        assert option in help_text, json.dumps(options)
