"""Options of an upload as a form."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest

from services.cli.client import CommandFailed
from services.cli.upload_form import bundle, make_form, parse_head, parse_label_names


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("mood", {"name": "mood"}),
        ("mood=feeling", {"name": "mood", "column": "feeling"}),
        ("topics:multi_label", {"name": "topics", "type": "multi_label"}),
        ("topics:multi_label=t", {"name": "topics", "type": "multi_label", "column": "t"}),
        ("topics=t:multi_label", {"name": "topics", "type": "multi_label", "column": "t"}),
        ("mood=a:b", {"name": "mood", "column": "a:b"}),
        ("label=情感", {"name": "label", "column": "情感"}),
        (
            "topics:multi_label=a,b",
            {"name": "topics", "type": "multi_label", "columns": ["a", "b"]},
        ),
    ],
)
def test_a_head_is_parsed_in_either_order(text: str, head: dict[str, Any]) -> None:
    assert parse_head(text) == head


def test_label_names_are_read_from_a_list_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"0": "glad", "1": "sad"}')
    (tmp_path / "b.csv").write_text("10,glad\n20,sad\n")
    (tmp_path / "c.txt").write_text("glad\nsad\n")
    options = ["a=glad,sad", *(f"{p.stem}x={p}" for p in sorted(tmp_path.iterdir()))]
    numbered = {"0": "glad", "1": "sad"}
    assert parse_label_names(options) == {
        "a": numbered,
        "ax": numbered,
        "bx": {"10": "glad", "20": "sad"},
        "cx": numbered,
    }


def test_label_names_without_a_head_are_refused() -> None:
    with pytest.raises(CommandFailed, match="is not HEAD=FIRST,SECOND"):
        parse_label_names(["glad,sad"])


def test_options_that_were_not_given_are_not_sent() -> None:
    form = make_form(heads=[], header=None, merge_labels=False, encoding=None, label_names={})
    assert form == {"heads": "[]"}
    assert make_form(header=False, merge_labels=True) == {"header": "false", "merge_labels": "true"}


def test_a_directory_is_sent_as_an_archive(tmp_path: Path) -> None:
    for folder in ("glad", "sad"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.txt").write_text(folder)
    with bundle([tmp_path]) as (name, content):
        assert name == f"{tmp_path.name}.zip"
        assert zipfile.ZipFile(content).namelist() == ["glad/1.txt", "sad/1.txt"]
