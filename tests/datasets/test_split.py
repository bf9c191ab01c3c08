"""Where texts go: by themselves alone, and the same for ever."""

from __future__ import annotations

from collections import Counter

import pytest

from services.shared.datasets.card import Split
from services.shared.datasets.split import split_of, text_key
from services.shared.datasets.upload import SplitFractions

TEXTS = [f"text number {n}" for n in range(20_000)]


def test_the_shares_come_out_as_asked() -> None:
    counts = Counter(split_of(text_key(text), SplitFractions()) for text in TEXTS)
    # Three standard deviations of a binomial share of 0.1 over 20,000 texts are 0.0064.
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


def test_form_and_outer_space_do_not_matter() -> None:
    assert text_key(" cafe\u0301\n") == text_key("caf\u00e9")
    assert text_key("a b") != text_key("a  b")


def test_growing_the_validation_share_takes_no_text_out_of_it() -> None:
    small = SplitFractions(train=0.8, validation=0.1, test=0.1)
    large = SplitFractions(train=0.7, validation=0.2, test=0.1)
    for text in TEXTS[:2000]:
        key = text_key(text)
        if split_of(key, small) is Split.VALIDATION:
            assert split_of(key, large) is Split.VALIDATION


def test_a_share_of_one_takes_everything() -> None:
    everything = SplitFractions(train=1, validation=0, test=0)
    assert {split_of(text_key(text), everything) for text in TEXTS[:500]} == {Split.TRAIN}
