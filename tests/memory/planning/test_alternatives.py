"""Alternatives: only what fits, the least loss of fidelity first, each applicable."""

import pytest

from services.shared.memory.architecture.shape import from_preset
from services.shared.memory.hardware import Hardware, machine
from services.shared.memory.planning.alternatives import alternatives, choose, refused_by_host
from services.shared.memory.planning.plan import plan
from services.shared.memory.planning.plan_contract import Verdict
from services.shared.memory.recipe import Recipe
from services.shared.memory.sizes import GIB

_GOLDEN = from_preset("qwen3-32b", heads=(3, 7))
_FSDP1 = Recipe().with_changes({"engine": "fsdp1"})


def _machine(ranks: int = 8, host: int | None = 125 * GIB) -> Hardware:
    return machine("k100_ai", ranks=ranks, host_memory_bytes=host)


@pytest.mark.parametrize("ranks", [7, 8])
def test_the_golden_case_fits_first_with_the_optimizer_in_backward(ranks: int) -> None:
    first = alternatives(_GOLDEN, _FSDP1, _machine(ranks))[0]
    assert first.changes == {"optimizer_in_backward": True}
    assert first.lossless
    assert first.plan.verdict is Verdict.FITS


def test_lossless_alternatives_come_before_lossy_ones() -> None:
    lossless = [a.lossless for a in alternatives(_GOLDEN, _FSDP1, _machine())]
    assert lossless == sorted(lossless, reverse=True)
    assert False in lossless


def test_every_alternative_is_the_plan_of_its_changes() -> None:
    hardware = _machine()
    for offered in alternatives(_GOLDEN, _FSDP1, hardware):
        document = offered.to_dict()
        applied = plan(_GOLDEN, _FSDP1.with_changes(document["changes"]), hardware)
        assert applied.peak_bytes == document["peak_bytes"]
        assert applied.runs
        assert document["change"]
        assert document["costs"]


def test_offload_is_offered_only_where_the_host_holds_it() -> None:
    small = {str(a.changes.get("offload")) for a in alternatives(_GOLDEN, _FSDP1, _machine())}
    large = alternatives(_GOLDEN, _FSDP1, _machine(host=1024 * GIB))
    assert small == {"None"}
    assert {"optimizer", "all"} <= {a.changes.get("offload") for a in large}


def test_offload_is_not_offered_for_an_unknown_host() -> None:
    offered = alternatives(_GOLDEN, _FSDP1, _machine(host=None))
    assert not [a for a in offered if "offload" in a.changes]


def test_the_golden_host_refuses_both_offloads() -> None:
    refused = refused_by_host(_GOLDEN, _FSDP1, _machine())
    assert [a.changes["offload"] for a in refused] == ["optimizer", "all"]
    assert all(a.plan.host.peak_bytes > 250 * GIB for a in refused)


def test_a_large_micro_batch_is_divided_at_the_same_global_batch() -> None:
    recipe = Recipe().with_changes({"micro_batch": 16, "activation_checkpointing": True})
    shape = from_preset("qwen3-8b", heads=(2,))
    hardware = machine("a100-80", ranks=2, device_memory_bytes=72 * GIB)
    offered = [a for a in alternatives(shape, recipe, hardware) if "micro_batch" in a.changes]
    assert offered
    for alternative in offered:
        changed = recipe.with_changes(alternative.changes)
        assert changed.micro_batch * changed.accumulate == 16


def test_choose_keeps_a_recipe_that_fits() -> None:
    recipe = Recipe().with_changes({"parameters": "bfloat16"})
    chosen = choose(_GOLDEN, recipe, _machine())
    assert chosen is not None
    assert chosen.recipe == recipe


def test_choose_takes_the_first_alternative_of_one_that_does_not() -> None:
    chosen = choose(_GOLDEN, _FSDP1, _machine())
    assert chosen is not None
    assert chosen.recipe.optimizer_in_backward


def test_choose_finds_nothing_where_nothing_fits() -> None:
    hardware = machine("t4", ranks=1, host_memory_bytes=8 * GIB)
    assert choose(_GOLDEN, _FSDP1, hardware) is None
