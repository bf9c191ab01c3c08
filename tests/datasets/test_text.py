"""The three kinds of text: their characters, their columns and their keys."""

from __future__ import annotations

import pytest

from services.shared.datasets.split import text_key
from services.shared.datasets.text import (
    Chat,
    Message,
    Pair,
    Text,
    TextKind,
    character_fault,
    from_columns,
    kind_of,
    plain_text,
    remove_control_characters,
    to_columns,
)

CHAT = Chat((Message("user", "Is it clean?"), Message("assistant", "是的")))
TEXTS: list[Text] = ["one", Pair("one", "two"), CHAT]


@pytest.mark.parametrize("text", TEXTS)
def test_a_text_survives_its_columns(text: Text) -> None:
    assert from_columns(kind_of(text), *to_columns(text)) == text


def test_a_pair_without_its_second_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="no second text"):
        from_columns(TextKind.PAIR, "one", None)


def test_pairs_differ_where_either_text_does_and_where_they_are_swapped() -> None:
    pairs: list[Text] = [
        Pair("a", "b"),
        Pair("b", "a"),
        Pair("a", "c"),
        Pair("ab", ""),
        "a",
        "ab",
        "a\nb",
    ]
    assert len({text_key(pair) for pair in pairs}) == len(pairs)
    assert text_key(Pair(" a", "b\n")) == text_key(Pair("a", "b"))


def test_texts_are_shown_as_one_string() -> None:
    assert [plain_text(text) for text in TEXTS] == [
        "one",
        "one\ntwo",
        "user: Is it clean?\nassistant: 是的",
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a\tb\r\nc\fd\v", None),
        ("a\x00", "contains a NUL character"),
        ("a\x1b[0m", "contains the control character U+001B"),
        ("a\x7f", "contains the control character U+007F"),
        ("a\ud800", "contains a lone surrogate, which is not valid Unicode"),
    ],
)
def test_control_characters_are_named(text: str, fault: str | None) -> None:
    assert character_fault(text) == fault
    cleaned = remove_control_characters(text)
    assert ("\ud800" in text) == (character_fault(cleaned) is not None)
