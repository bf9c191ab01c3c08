"""Timelines of adapters and of ZeRO: a message that one of them prints leaves it, another excludes it."""

import pytest

from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import Diagnosis, Hypothesis, Strength
from services.shared.memory.forensics.evidence import gather_evidence
from services.shared.memory.forensics.matching.rounding import Rounding
from services.shared.memory.forensics.scenarios import plan_with
from services.shared.memory.sizes import GIB, MIB

MODEL = {
    "model_name": "Qwen2.5-7B classifier",
    "heads": [3],
    "ranks": 8,
    "micro_batch": 1,
    "sequence_length": 2048,
    "activation_checkpointing": True,
    "device_memory_bytes": 80 * GIB,
    "optimizer": "adamw_torch_fused",
}


def message_of(strategy: str) -> str:
    """Return what torch would print if the highest moment of the job were refused."""
    evidence = gather_evidence(Case.from_dict({**MODEL, "sharding_strategy": strategy}))
    planned = plan_with(evidence)
    assert planned is not None
    crossing = planned.first_exceeding(planned.peak_bytes - 1)
    assert crossing is not None
    asked = Rounding().driver_request(crossing.request_bytes) / MIB
    held = crossing.allocated_bytes / GIB
    return (
        f"CUDA out of memory. Tried to allocate {asked:.2f} MiB. Of the allocated memory "
        f"{held:.2f} GiB is allocated by PyTorch"
    )


def diagnosis_of(strategy: str, log: str, **stated: object) -> Diagnosis:
    return diagnose(Case.from_dict({**MODEL, "sharding_strategy": strategy, "log": log, **stated}))


def scenario(found: Diagnosis, words: str) -> Hypothesis:
    (one,) = [h for h in found.hypotheses if words in h.what]
    return one


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("DeepSpeed ZeRO-3", "ZeRO-3 as configured"),
        ("DeepSpeed ZeRO-2", "ZeRO-2 as configured"),
        ("FSDP2, LoRA", "adapters over sharded"),
        ("DDP, LoRA", "adapters over whole"),
    ],
)
def test_a_message_of_the_configured_timeline_leaves_it(strategy: str, words: str) -> None:
    log = message_of(strategy)
    found = diagnosis_of(strategy, log)
    left = scenario(found, words)
    assert left.strength is not Strength.EXCLUDED
    assert left.tokens or left.where


def test_whole_frozen_weights_are_excluded_by_the_message_of_sharded_ones() -> None:
    log = message_of("FSDP2, LoRA")
    found = diagnosis_of("FSDP2, LoRA", log)
    assert scenario(found, "adapters, not sharded").strength is Strength.EXCLUDED


def test_planned_peaks_and_changes_of_adapters_are_not_those_of_full_training() -> None:
    log = message_of("DDP, LoRA")
    adapters = diagnosis_of("DDP, LoRA", log)
    full = diagnosis_of("DDP", log)
    assert adapters.planned is not None
    assert full.planned is not None
    assert adapters.planned.peak_bytes < full.planned.peak_bytes / 4
    assert not any("optimizer" in remedy.changes for remedy in adapters.remedies)
