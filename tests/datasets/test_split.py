"""Splits are assigned by the text alone and never change."""

from __future__ import annotations

from collections import Counter

import pytest

from services.shared.datasets.card import Split
from services.shared.datasets.split import assign_split, text_key
from services.shared.datasets.upload import SplitFractions

TEXTS = [f"text number {n}" for n in range(20_000)]


def test_splits_have_the_requested_fractions() -> None:
    counts = Counter(assign_split(text_key(text), SplitFractions()) for text in TEXTS)
    # Three standard deviations of a binomial fraction of 0.1 over 20,000 texts are 0.0064.
    assert counts[Split.VALIDATION] / len(TEXTS) == pytest.approx(0.1, abs=0.0064)
    assert counts[Split.TEST] / len(TEXTS) == pytest.approx(0.1, abs=0.0064)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("good", "ace3e44f7b84a8f8994c54ff60fc4217"),
        ("很好", "d02ee98e0c828953396b3dc006827775"),
    ],
)
def test_keys_never_change(text: str, key: str) -> None:
    assert text_key(text).hex() == key


def test_keys_ignore_unicode_form_and_outer_white_space() -> None:
    assert text_key(" cafe\u0301\n") == text_key("caf\u00e9")
    assert text_key("a b") != text_key("a  b")


def test_a_larger_validation_fraction_keeps_the_texts_of_a_smaller_one() -> None:
    small = SplitFractions(train=0.8, validation=0.1, test=0.1)
    large = SplitFractions(train=0.7, validation=0.2, test=0.1)
    for text in TEXTS[:2000]:
        key = text_key(text)
        if assign_split(key, small) is Split.VALIDATION:
            assert assign_split(key, large) is Split.VALIDATION


def test_a_training_fraction_of_one_takes_every_text() -> None:
    everything = SplitFractions(train=1, validation=0, test=0)
    assert {assign_split(text_key(text), everything) for text in TEXTS[:500]} == {Split.TRAIN}
