"""The split master: every float32 there and back, and steps equal to those of a float32 master."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.shared.training.optim.adamw_8bit import BLOCK
from services.shared.training.optim.adamw_split import REST, AdamWSplit, join, split_into
from services.shared.training.optim.parameter_groups import ParameterGroup
from services.shared.training.optim.stochastic_rounding import SeededGenerators
from services.shared.training.sharding.shard import LocalShard

SIZE = 5 * BLOCK + 77


def there_and_back(values: Tensor, dtype: torch.dtype = torch.int16) -> tuple[Tensor, Tensor]:
    """Return the bfloat16 half and the joined master of float32 values."""
    upper = torch.empty(values.shape, dtype=torch.bfloat16)
    rest = torch.empty(values.shape, dtype=dtype)
    generator = SeededGenerators(seed=0, rank=0).for_label(values.device, "x")
    split_into(upper, rest, values, generator)
    return upper, join(upper, rest)


def of_bits(bits: list[int]) -> Tensor:
    return torch.from_numpy(np.array(bits, np.uint32).view(np.float32).copy())


def rule_of(shard: LocalShard, *, master_bits: int = 32, decay: float = 0.1) -> AdamWSplit:
    return AdamWSplit([ParameterGroup([shard], decay)], seed=0, rank=0, master_bits=master_bits)


def shard_of(values: Tensor) -> LocalShard:
    parameter = torch.nn.Parameter(values)
    local = parameter.detach()
    return LocalShard("w", tuple(local.shape), 0, len(local), 0, parameter, local)


def draw(seed: int) -> Tensor:
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) ** 3


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64))
def test_any_bit_pattern_comes_back(bits: list[int]) -> None:
    values = of_bits(bits)
    _, joined = there_and_back(values)
    assert torch.equal(joined.view(torch.int32), values.view(torch.int32))


def test_every_lower_half_of_some_upper_halves_comes_back() -> None:
    # Zeros, subnormals, one, the largest finite, infinities, NaN, all with both signs.
    lower = np.arange(2**16, dtype=np.uint32)
    for upper in (0x0000, 0x0001, 0x007F, 0x0080, 0x3F80, 0x7F7F, 0x7F80, 0x7FFF):
        for sign in (0, 0x8000):
            bits = ((sign | upper) << 16) + lower
            values = torch.from_numpy(bits.astype(np.uint32).view(np.float32).copy())
            _, joined = there_and_back(values)
            assert torch.equal(joined.view(torch.int32), values.view(torch.int32))


def test_the_parameter_is_the_master_rounded_to_nearest() -> None:
    values = draw(0)
    upper, _ = there_and_back(values)
    assert torch.equal(upper, values.bfloat16())  # no value of this draw is a tie
    tie = of_bits([0x3F808000, 0xBF808000])  # ties go away from zero
    assert there_and_back(tie)[0].tolist() == [1 + 2**-7, -1 - 2**-7]


def test_a_24_bit_master_is_within_one_step_and_right_on_average() -> None:
    values = torch.full(
        (100_000,), 1 + 2**-17
    )  # half-way between two masters, 2^-15 apart: a quarter
    _, joined = there_and_back(values, torch.int8)
    assert set(joined.tolist()) == {1.0, 1 + 2**-15}
    assert float((joined - 1).double().mean()) == pytest.approx(2**-17, rel=0.03)
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), 2.0**-149])
    _, joined = there_and_back(special, torch.int8)
    assert torch.equal(joined[:4], special[:4])


def test_the_master_is_bit_equal_to_float32_adamw_of_the_same_moments() -> None:
    weights = draw(1).bfloat16()
    shard = shard_of(weights.clone())
    rule = rule_of(shard)
    master = weights.float()
    for step in range(8):
        g = draw(step + 10).bfloat16()
        before = {key: t.clone() for key, t in rule.state().get("w", {}).items()}
        moments = {
            key: rule._read(before, key) if before else torch.zeros(SIZE)
            for key in ("exp_avg", "exp_avg_sq")
        }
        shard.parameter.grad = g.clone()
        rule.apply([shard], 1e-2, step)
        mean = moments["exp_avg"].lerp(g.float(), 1 - 0.9)
        square = (moments["exp_avg_sq"] * 0.999).addcmul(g.float(), g.float(), value=1 - 0.999)
        denominator = (square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
        master = (master * (1 - 1e-2 * 0.1)).addcdiv(
            mean, denominator, value=-1e-2 / (1 - 0.9 ** (step + 1))
        )
        assert torch.equal(join(shard.local, rule.state()["w"][REST]), master)
    assert not torch.equal(master.bfloat16().float(), master)


def test_updates_too_small_for_bfloat16_add_up() -> None:
    shard = shard_of(torch.ones(BLOCK, dtype=torch.bfloat16))
    rule = rule_of(shard, decay=0.0)
    for step in range(200):
        shard.parameter.grad = torch.ones(BLOCK, dtype=torch.bfloat16)
        rule.apply([shard], 1e-4, step)  # bfloat16 values below 1 are 2^-8 apart
    assert shard.local.float().tolist() == pytest.approx([1 - 0.02] * BLOCK, abs=2**-9)


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_moments_are_within_the_distance_of_two_codes(key: str) -> None:
    rule = rule_of(shard_of(draw(1).bfloat16()))
    state = rule._empty(torch.empty(SIZE, dtype=torch.bfloat16))
    values = draw(2) if key == "exp_avg" else draw(2).abs()
    rule._write(state, key, values)
    found = rule._read(state, key)
    each = state[f"{key}_scale"].repeat_interleave(BLOCK)[:SIZE]
    levels, root = (127, 4) if key == "exp_avg" else (255, 8)
    coded = (values.abs() / each) ** (1 / root)
    # Half a code on the scale of roots, and the smallest code instead of zero for second moments.
    allowed = 0.5001 / levels + (coded < 1 / levels) * (1 / levels)
    assert bool((((found.abs() / each) ** (1 / root) - coded).abs() <= allowed).all())
    assert bool((found.sign() * values.sign() >= 0).all())


def test_a_second_moment_above_zero_never_becomes_zero() -> None:
    rule = rule_of(shard_of(draw(1).bfloat16()))
    state = rule._empty(torch.empty(BLOCK, dtype=torch.bfloat16))
    values = torch.tensor([1.0, 1e-30, 0.0]).repeat(BLOCK)[:BLOCK]
    rule._write(state, "exp_avg_sq", values)
    assert torch.equal(rule._read(state, "exp_avg_sq") > 0, values > 0)


@pytest.mark.parametrize("master_bits", [32, 24])
def test_a_shard_of_several_chunks_is_updated_as_one(
    monkeypatch: pytest.MonkeyPatch, master_bits: int
) -> None:
    found = []
    for chunk in (AdamWSplit.chunk_elements, 2 * BLOCK):
        monkeypatch.setattr(AdamWSplit, "chunk_elements", chunk)
        shard = shard_of(draw(1).bfloat16())
        rule = rule_of(shard, master_bits=master_bits)
        for step in range(3):
            shard.parameter.grad = draw(step + 10).bfloat16()
            rule.apply([shard], 1e-2, step)
        found.append([shard.local, *rule.state()["w"].values()])
    pairs = list(zip(*found, strict=True))
    if master_bits == 32:
        assert all(torch.equal(one, other) for one, other in pairs)
    else:  # random numbers are drawn chunk by chunk, in another shape
        assert torch.allclose(pairs[0][0].float(), pairs[0][1].float(), rtol=0.01)
