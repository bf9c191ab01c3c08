"""AdamW with 8-bit moments against its definition, worked out block by block."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.shared.training.optim.adamw_8bit import BLOCK, AdamW8Bit, decode, encode_into, table
from services.shared.training.optim.parameter_groups import ParameterGroup
from services.shared.training.sharding.shard import LocalShard

SIZE = 3 * BLOCK + 41


def shard_of(values: Tensor) -> LocalShard:
    """Return a shard that holds all of a vector."""
    parameter = torch.nn.Parameter(values)
    local = parameter.detach()
    return LocalShard("w", tuple(local.shape), 0, len(local), 0, parameter, local)


def encoded(values: Tensor, *, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    entries = table(signed=signed)
    codes = torch.empty(len(values), dtype=torch.uint8)
    scale = torch.empty(-(-len(values) // BLOCK))
    encode_into(codes, scale, values, entries)
    return codes, scale, entries


def draw(seed: int, *, signed: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(SIZE, generator=generator) ** 3
    return values if signed else values.abs()


@pytest.mark.parametrize("signed", [True, False])
def test_a_table_has_256_values_in_order_with_zero_and_one(signed: bool) -> None:
    entries = table(signed=signed)
    assert len(entries) == 256
    assert bool((entries[1:] > entries[:-1]).all())
    assert {0.0, 1.0} <= set(entries.tolist())
    assert bool((entries >= (-1 if signed else 0)).all())


@pytest.mark.parametrize("signed", [True, False])
def test_every_value_becomes_the_nearest_entry_of_its_block(signed: bool) -> None:
    values = draw(0, signed=signed)
    codes, scale, entries = encoded(values, signed=signed)
    found = decode(codes, scale, entries)
    for at in range(0, SIZE, BLOCK):
        block = values[at : at + BLOCK]
        largest = block.abs().max()
        distance = (block[:, None] / largest - entries[None, :]).abs()
        if not signed:  # a second moment above zero never becomes zero
            distance[:, 0] = torch.where(block > 0, torch.inf, 0.0)
        nearest = entries[distance.argmin(1)] * largest
        assert torch.allclose(found[at : at + BLOCK], nearest, rtol=1e-6, atol=0)


def test_zeros_stay_zeros() -> None:
    codes, scale, entries = encoded(torch.zeros(SIZE), signed=True)
    assert decode(codes, scale, entries).count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_follow_adamw_whose_moments_are_rounded_between_steps(dtype: torch.dtype) -> None:
    weights = draw(1).to(dtype)
    shard = shard_of(weights.clone())
    rule = AdamW8Bit([ParameterGroup([shard], 0.1)], seed=0, rank=0)
    expected = weights.double()
    moments = [torch.zeros(SIZE), torch.zeros(SIZE)]
    for step in range(5):
        g = draw(step + 10).to(dtype)
        shard.parameter.grad = g
        rule.apply([shard], 1e-2, step)
        mean = 0.9 * moments[0] + 0.1 * g.float()
        square = 0.999 * moments[1] + 0.001 * g.float() ** 2
        for i, exact in enumerate((mean, square)):
            moments[i] = decode(*encoded(exact, signed=i == 0))
        # The update itself is made of the moments before they are rounded.
        expected *= 1 - 1e-2 * 0.1
        corrected = (square / (1 - 0.999 ** (step + 1))).sqrt() + 1e-8
        expected -= 1e-2 * (mean / (1 - 0.9 ** (step + 1))) / corrected
    allowed = 1e-5 if dtype == torch.float32 else 0.05
    assert torch.allclose(shard.local.double(), expected, rtol=allowed, atol=allowed)
    assert not torch.allclose(weights.double(), expected, rtol=0.02, atol=0.02)


def test_state_that_was_cut_elsewhere_is_encoded_anew() -> None:
    shard = shard_of(draw(1))
    rule = AdamW8Bit([ParameterGroup([shard], 0.0)], seed=0, rank=0)
    shard.parameter.grad = draw(2)
    rule.apply([shard], 1e-2, 0)
    state = rule.state()["w"]
    saved = {
        key: value.repeat_interleave(BLOCK)[:SIZE] if "scale" in key else value.clone()
        for key, value in state.items()
    }
    rule.restore("w", {key: value.clone() for key, value in saved.items()})
    assert all(torch.equal(rule.state()["w"][key], value) for key, value in state.items())

    shift = 100  # this rank's part now begins within a block
    rule.restore("w", {key: value[shift:].clone() for key, value in saved.items()})
    for key, signed in (("exp_avg", True), ("exp_avg_sq", False)):
        entries = table(signed=signed)
        before = decode(state[key], state[f"{key}_scale"], entries)[shift:]
        moved = rule.state()["w"]
        after = decode(moved[key], moved[f"{key}_scale"], entries)
        largest = before.abs().max()
        assert float((after - before).abs().max()) < 0.02 * float(largest)


def test_a_piece_of_several_chunks_is_updated_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for chunk in (AdamW8Bit.chunk_elements, 2 * BLOCK):
        monkeypatch.setattr(AdamW8Bit, "chunk_elements", chunk)
        shard = shard_of(draw(1))
        rule = AdamW8Bit([ParameterGroup([shard], 0.1)], seed=0, rank=0)
        for step in range(3):
            shard.parameter.grad = draw(step + 10)
            rule.apply([shard], 1e-2, step)
        found.append([shard.local, *rule.state()["w"].values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
