"""Every recipe follows its plain reference, whenever its gradients are applied."""

from __future__ import annotations

import math

import pytest
import torch

from services.shared.jobs.spec import Training
from services.shared.training.optim.optimizer import learning_rate
from services.shared.training.optim.stochastic_rounding import SeededGenerators, round_into
from tests.training.rank_checks import Measured

RULES = ["adamw fused", "adamw foreach", "adamw on host", "sgd", "adafactor"]
CASES = [f"{e} {s} {p}" for e in ("fsdp1", "fsdp2") for s in ("full", "none") for p in (1, 2)]


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("rule", RULES)
def test_rule_follows_torchs_optimizer_on_one_process(
    measured: Measured, engine: str, rule: str
) -> None:
    found = measured("rules_follow_plain_optimizers")[f"{engine} {rule}"]
    assert found["moved"] > 0.005
    assert found["loss"] < 1e-6
    # Adam divides by the gradient's own size: where that is near rounding, so is what differs. Processors
    # add up in different orders: below 2e-6 with AVX-512, 4e-6 with AVX2.
    assert found["weights"] < 1e-5


@pytest.mark.parametrize("case", CASES)
def test_adamw_in_the_backward_pass_is_bit_equal_to_adamw_after_it(
    measured: Measured, case: str
) -> None:
    found = measured("backward_is_bit_equal")[case]
    assert found["losses_equal"]
    assert found["weights_equal"]


@pytest.mark.parametrize("case", CASES)
def test_no_gradient_outlives_a_backward_pass_that_applies_them(
    measured: Measured, case: str
) -> None:
    assert measured("backward_is_bit_equal")[case]["gradients_left"] == 0


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_bfloat16_state_is_all_there_is(measured: Measured, engine: str) -> None:
    found = measured("small_state_learns_like_fp32")[f"{engine} adamw_bf16"]
    assert found["parameters"] == found["state"] == ["torch.bfloat16"]


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_two_8_bit_moments_take_little_more_than_two_bytes(measured: Measured, engine: str) -> None:
    found = measured("small_state_learns_like_fp32")[f"{engine} adamw_8bit"]
    assert found["parameters"] == ["torch.float32"]
    assert found["state"] == ["torch.float32", "torch.uint8"]  # scales and codes
    # 8/256 of a byte for scales, more where a small shard does not fill its last block.
    assert 2 < found["state_bytes"] / found["elements"] < 2.1


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(("optimizer", "width"), [("adamw_split", 4), ("adamw_split24", 3)])
def test_a_split_master_takes_its_rest_and_two_moments(
    measured: Measured, engine: str, optimizer: str, width: int
) -> None:
    found = measured("small_state_learns_like_fp32")[f"{engine} {optimizer}"]
    assert found["parameters"] == ["torch.bfloat16"]
    assert width < found["state_bytes"] / found["elements"] < width + 0.1


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("optimizer", "allowed"),
    [("adamw_bf16", 0.12), ("adamw_8bit", 0.02), ("adamw_split", 0.12), ("adamw_split24", 0.12)],
)
def test_small_state_learns_like_float32(
    measured: Measured, engine: str, optimizer: str, allowed: float
) -> None:
    found = measured("small_state_learns_like_fp32")
    full, small = found[f"{engine} adamw"]["losses"], found[f"{engine} {optimizer}"]["losses"]
    assert small[:4] == pytest.approx(full[:4], rel=allowed)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("parts", [1, 2])
def test_clipping_after_the_step_is_by_the_norm_over_all_ranks(
    measured: Measured, engine: str, parts: int
) -> None:
    found = measured("clipping")
    case = found["cases"][f"{engine} False {parts}"]
    assert case["norm"] == pytest.approx(found["true_norm"], rel=1e-6)
    assert case["update"] == pytest.approx(0.05, rel=1e-5)


@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("parts", [1, 2])
def test_clipping_unit_by_unit_never_exceeds_the_limit(
    measured: Measured, engine: str, parts: int
) -> None:
    case = measured("clipping")["cases"][f"{engine} True {parts}"]
    assert 0.03 < case["update"] <= 0.05


@pytest.mark.parametrize("in_backward", ["False", "True"])
def test_a_gradient_that_is_not_finite_stops_before_it_is_applied(
    measured: Measured, in_backward: str
) -> None:
    found = measured("infinite_gradient_stops")[in_backward]
    assert found["reason"] == "non_finite_loss"
    assert found["untouched"]


def test_stochastic_rounding_keeps_the_mean() -> None:
    # Above 1 two bfloat16 values are 2^-7 apart: this one is an eighth of the way between them.
    values = torch.full((200_000,), 1 + 2**-10)
    target = torch.empty_like(values, dtype=torch.bfloat16)
    round_into(target, values, SeededGenerators(seed=0, rank=0).for_label(values.device, "x"))
    assert set(target.float().tolist()) == {1.0, 1 + 2**-7}
    # The share rounded up is 1/8 with a standard error of 0.0007.
    assert target.float().mean().item() == pytest.approx(1 + 2**-10, abs=4 * 0.0008 * 2**-7)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.0, -1.5])
def test_stochastic_rounding_leaves_what_needs_none(value: float) -> None:
    target = torch.empty(64, dtype=torch.bfloat16)
    generator = SeededGenerators(seed=0, rank=0).for_label(target.device, "x")
    round_into(target, torch.full((64,), value), generator)
    assert torch.equal(
        target.float().nan_to_num(nan=9.0), torch.full((64,), value).nan_to_num(nan=9.0)
    )


def test_generators_differ_by_label_and_repeat_by_seed() -> None:
    def draw(label: str) -> torch.Tensor:
        generator = SeededGenerators(seed=1, rank=0).for_label(torch.device("cpu"), label)
        return torch.rand(4, generator=generator)

    assert torch.equal(draw("a"), draw("a"))
    assert not torch.equal(draw("a"), draw("b"))


def rates(schedule: str, total: int = 20) -> list[float]:
    training = Training(learning_rate=1.0, schedule=schedule, warmup_ratio=0.2)
    return [learning_rate(step, total, training) for step in range(total)]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_warm_up_is_linear_and_reaches_the_rate(schedule: str) -> None:
    assert rates(schedule)[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


def test_linear_decay_ends_one_step_above_zero() -> None:
    assert rates("linear")[-1] == pytest.approx(1 / 16)


def test_cosine_decay_is_half_way_in_the_middle() -> None:
    assert rates("cosine")[12] == pytest.approx(0.5)


def test_constant_rate_stays() -> None:
    assert rates("constant")[-1] == 1.0


def test_a_single_step_trains_at_the_full_rate() -> None:
    assert rates("cosine", total=1) == [1.0]
