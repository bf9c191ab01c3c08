"""Adapters over frozen weights and ZeRO's partitions, against sums that need no simulation."""

import pytest

from services.shared.memory.architecture.shape import find_preset
from services.shared.memory.hardware import machine
from services.shared.memory.planning.ledger import PlanPhase
from services.shared.memory.planning.plan import Plan, plan
from services.shared.memory.planning.timeline_views import (
    FrozenBase,
    TimelineView,
    ZeroPartitions,
)
from services.shared.memory.recipe import Engine, Precision, Recipe, Sharding
from services.shared.memory.sizes import GIB

FOUND = find_preset("Llama-2-7B")
assert FOUND is not None
LLAMA = FOUND.with_language_head()
WEIGHTS = 2 * LLAMA.num_parameters
RECIPE = Recipe(
    engine=Engine.DDP, sharding=Sharding.NONE, parameters=Precision.BFLOAT16, sequence_length=512
)
SHARDED = RECIPE.with_changes({"engine": Engine.FSDP2, "sharding": Sharding.FULL})


def planned(view: TimelineView | None, recipe: Recipe = RECIPE, ranks: int = 8) -> Plan:
    return plan(LLAMA, recipe, machine("a100-80", ranks=ranks), view=view)


def test_frozen_weights_have_neither_gradients_nor_state() -> None:
    adapters = planned(FrozenBase(), ranks=1)
    assert adapters.components.gradients == adapters.components.unsharded_gradients == 0
    assert adapters.components.parameters == pytest.approx(WEIGHTS, rel=1e-4)
    assert WEIGHTS < adapters.peak_bytes < WEIGHTS + 1 * GIB
    full = planned(None, ranks=1)
    assert full.peak_bytes - adapters.peak_bytes > 3 * WEIGHTS - 1 * GIB


def test_activations_of_adapters_are_those_of_the_plan_less_its_weight_gradients() -> None:
    long = RECIPE.with_changes({"activation_checkpointing": False, "sequence_length": 2048})
    adapters, full = planned(FrozenBase(), long, ranks=1), planned(None, long, ranks=1)
    forward, alike = (p.phase_peaks[PlanPhase.FORWARD] for p in (adapters, full))
    assert forward.components.activations == alike.components.activations
    assert forward.components.temporaries <= alike.components.temporaries


def test_quantised_weights_take_their_bits_and_a_weight_is_unpacked_at_a_time() -> None:
    whole, four = planned(FrozenBase(), ranks=1), planned(FrozenBase(bits=4), ranks=1)
    matrices = sum(t.elements for unit in LLAMA.layers for t in unit.tensors if len(t.shape) > 1)
    saved = matrices * (2 - 0.5 - 4 / 64)
    held = whole.components.parameters - four.components.parameters
    assert held == pytest.approx(saved, rel=1e-3)
    unpacked = 2 * LLAMA.dims.hidden_size * LLAMA.dims.intermediate_size
    assert whole.peak_bytes - four.peak_bytes == pytest.approx(saved - unpacked, rel=1e-2)


def test_sharded_adapters_hold_their_share_and_gather_layer_by_layer() -> None:
    adapters = planned(FrozenBase(), SHARDED)
    assert adapters.components.parameters == pytest.approx(WEIGHTS / 8, rel=1e-3)
    assert adapters.components.unsharded > LLAMA.layers[0].elements * 2
    assert adapters.peak_bytes < planned(None, SHARDED).peak_bytes


@pytest.mark.parametrize(
    ("stage", "bytes_a_parameter"),
    [(1, 2 + 2 + 16 / 8), (2, 2 + (2 + 16) / 8), (3, (2 + 2 + 12 + 4) / 8)],
)
def test_the_update_of_zero_holds_weights_gradients_state_and_a_float32_copy(
    stage: int, bytes_a_parameter: float
) -> None:
    zero = planned(ZeroPartitions(stage, 8), SHARDED if stage == 3 else RECIPE)
    update = zero.phase_peaks[PlanPhase.OPTIMIZER_STEP]
    copied = update.request_bytes
    assert copied == pytest.approx(4 * LLAMA.num_parameters / 8, rel=1e-4)
    expected = bytes_a_parameter * LLAMA.num_parameters
    assert update.live_bytes == pytest.approx(expected, rel=1e-3)


def test_zeros_state_is_allocated_before_the_first_step_and_its_bucket_in_backward() -> None:
    zero = planned(ZeroPartitions(2, 8, bucket_elements=200_000_000))
    first = zero.phase_peaks[PlanPhase.FORWARD]
    assert first.components.optimizer == pytest.approx(12 * LLAMA.num_parameters / 8, rel=1e-4)
    backward = zero.phase_peaks[PlanPhase.BACKWARD]
    assert backward.components.communication == 400_000_000


def test_every_point_adds_up() -> None:
    views = ((FrozenBase(4), RECIPE), (FrozenBase(), SHARDED), (ZeroPartitions(2, 8), RECIPE))
    for view, recipe in (*views, (ZeroPartitions(3, 8), SHARDED)):
        for point in planned(view, recipe).timeline:
            assert sum(point.components) == point.live_bytes
            assert min(point.components) >= 0
            assert point.maxima[-1].live_bytes + point.base_bytes == point.live_bytes
