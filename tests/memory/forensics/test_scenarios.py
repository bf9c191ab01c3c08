"""Closed loop: a failure that the plan predicts is printed, read back, and never excluded."""

import itertools

import pytest

from services.shared.memory.architecture.shape import from_preset
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import Confidence, Diagnosis, Sharded, Strength
from services.shared.memory.forensics.request_matching import Rounding
from services.shared.memory.hardware import machine
from services.shared.memory.planning.plan import plan
from services.shared.memory.recipe import Recipe
from services.shared.memory.sizes import GIB, MIB

# How a job runs, unknown to who reads its message, and the words of the explanation for it.
WAYS = {
    "fused": ({"optimizer_impl": "fused"}, "without temporaries"),
    "foreach": ({"optimizer_impl": "foreach"}, "foreach"),
    "no_sync": ({"accumulate": 4, "reduce_each": False}, "no_sync"),
    "grad_op": ({"sharding": "grad_op"}, "SHARD_GRAD_OP"),
    "bfloat16": ({"parameters": "bfloat16", "upcast_after_wrap": False}, "bfloat16 state"),
    "root": ({"wrap": "root"}, "wrap too coarse"),
}
JOBS = list(
    itertools.product(
        WAYS,
        [("qwen3-8b", 4, "fsdp1", 1500), ("llama-2-13b", 8, "fsdp2", 3000)],
        [0.8, 0.97],
    )
)


def printed(size_bytes: int) -> str:
    if size_bytes <= GIB:
        return f"{size_bytes / MIB:.2f} MiB"
    return f"{size_bytes / GIB:.2f} GiB"


def failure(way: str, job: tuple, share: float) -> Diagnosis | None:
    """Run a job on a card that holds `share` of its peak, and diagnose what it prints."""
    model, ranks, engine, tokens = job
    recipe = Recipe(sequence_length=tokens, loading="rank0").with_changes(
        {"engine": engine} | WAYS[way][0]
    )
    planned = plan(from_preset(model, heads=(3,)), recipe, machine("a100-80", ranks=ranks))
    crossing = planned.first_past(int(planned.peak_bytes * share))
    if crossing is None or crossing.request_bytes < 10 * MIB:
        return None
    requested = Rounding().driver_request(crossing.request_bytes)
    total = printed(crossing.allocated_bytes + requested + 2 * GIB)
    return diagnose(
        Case.from_dict(
            {
                "log": f"CUDA out of memory. Tried to allocate {printed(requested)}. GPU 0 has a total "
                f"capacity of {total}. Of the allocated memory {printed(crossing.allocated_bytes)} is "
                "allocated by PyTorch",
                "model_name": model,
                "heads": [3],
                "ranks": ranks,
                "framework": engine,
                "precision": "bf16",
                "activation_checkpointing": True,
            }
        )
    )


@pytest.mark.parametrize(("way", "job", "share"), JOBS)
def test_the_true_way_is_never_excluded_and_sharding_is_seen(way, job, share) -> None:
    found = failure(way, job, share)
    if found is None:
        pytest.skip("dies of a request whose printed size names no tensor")
    true = [h for h in found.hypotheses if WAYS[way][1] in h.what]
    assert true
    assert all(h.strength is not Strength.EXCLUDED for h in true)
    assert found.sharded in (Sharded.YES, Sharded.PARTLY)
    assert found.confidence is not Confidence.CERTAIN
