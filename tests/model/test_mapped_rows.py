"""Rows and tokens in mapped files are those in memory, and appear whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from services.shared.datasets.card import Head, HeadType
from services.shared.datasets.text import Chat, Message, Pair, Text, TextKind, kind_of
from services.shared.model.mapped_arrays import Array, new_directory
from services.shared.model.mapped_rows import open_rows, open_tokens, write_rows, write_tokens
from services.shared.model.tokens import Rows, load_tokenizer, tokenise

HEADS = [
    Head(name="mood", labels=["bad", "good"]),
    Head(name="topics", type=HeadType.MULTI_LABEL, labels=["a", "b", "c"]),
]
KINDS: dict[TextKind, list[Text]] = {
    TextKind.SINGLE: ["the room was clean", "屏幕很清楚", "x " * 40],
    TextKind.PAIR: [Pair("the room", "was clean"), Pair("屏幕", ""), Pair("", "x")],
    TextKind.CHAT: [Chat((Message("user", "屏幕"), Message("assistant", "x"))), Chat(())],
}


def rows_of(texts: list[Text]) -> Rows:
    labels: dict[str, Array] = {"mood": np.arange(len(texts), dtype=np.int32) % 2}
    labels["topics"] = np.eye(3, dtype=np.float32)[np.arange(len(texts)) % 3]
    return Rows(texts, np.arange(len(texts)) + 5, labels)


def write(directory: Path, texts: list[Text], kind: TextKind) -> Rows:
    with new_directory(directory) as writer:
        write_rows(writer, [rows_of(texts[:1]), rows_of(texts[1:])], HEADS, kind)
    return open_rows(directory, HEADS)


@pytest.mark.parametrize("kind", TextKind)
def test_rows_are_read_as_they_were_written(tmp_path: Path, kind: TextKind) -> None:
    texts = KINDS[kind]
    found = write(tmp_path / "rows", texts, kind)
    assert list(found.texts) == texts
    assert found.texts[-1] == texts[-1]
    assert found.texts[1:] == texts[1:]
    assert {kind_of(text) for text in found.texts} == {kind}
    np.testing.assert_array_equal(found.lines, [5, *range(5, 4 + len(texts))])
    for name, values in rows_of(texts[1:]).labels.items():
        np.testing.assert_array_equal(found.labels[name][1:], values)


def test_tokens_are_those_of_the_texts(tmp_path: Path, tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    rows = write(tmp_path / "rows", KINDS[TextKind.SINGLE] * 700, TextKind.SINGLE)
    reports = []
    with new_directory(tmp_path / "tokens") as writer:
        write_tokens(
            writer,
            rows,
            tokenizer,
            max_length=16,
            prefix="",
            report=lambda *done: reports.append(done),
        )
    found = open_tokens(tmp_path / "tokens", rows)
    expected = tokenise(rows, tokenizer, max_length=16, prefix="")
    assert found.truncated == expected.truncated == 1400
    np.testing.assert_array_equal(found.flat, expected.flat)
    np.testing.assert_array_equal(found.offsets, expected.offsets)
    assert reports == [(1000, 2100), (2000, 2100), (2100, 2100)]


def test_an_empty_split_is_mapped_too(tmp_path: Path, tokenizer_dir: Path) -> None:
    with new_directory(tmp_path / "rows") as writer:
        write_rows(writer, [], HEADS, TextKind.SINGLE)
    rows = open_rows(tmp_path / "rows", HEADS)
    assert len(rows) == 0
    assert rows.labels["topics"].shape == (0, 3)
    with new_directory(tmp_path / "tokens") as writer:
        write_tokens(
            writer,
            rows,
            load_tokenizer(tokenizer_dir),
            max_length=16,
            prefix="",
            report=lambda *_: None,
        )
    assert len(open_tokens(tmp_path / "tokens", rows)) == 0


def test_a_directory_that_was_not_finished_does_not_appear(tmp_path: Path) -> None:
    def chunks() -> Iterator[Rows]:
        yield rows_of(KINDS[TextKind.SINGLE])
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"), new_directory(tmp_path / "rows") as writer:
        write_rows(writer, chunks(), HEADS, TextKind.SINGLE)
    assert list(tmp_path.iterdir()) == []
