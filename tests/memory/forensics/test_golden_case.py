"""A published failure without an accepted explanation, given exactly as its author published it."""

import json
from pathlib import Path

import pytest

from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import (
    Cause,
    Confidence,
    Diagnosis,
    Hypothesis,
    RecipeChanges,
    Remedy,
    Sharded,
    Strength,
)
from services.shared.memory.forensics.matching.candidates import Match, Role
from services.shared.memory.sizes import GIB, MIB

CASE = json.loads((Path(__file__).parents[2] / "data" / "golden_case.json").read_text())
PRINT = 0.005 * GIB  # half of the last digit of "59.36 GB"


@pytest.fixture(scope="module")
def golden() -> Diagnosis:
    return diagnose(Case.from_dict(CASE))


def explanation(golden: Diagnosis, words: str) -> Hypothesis:
    (found,) = [h for h in golden.hypotheses if words in h.what]
    return found


def remedy(golden: Diagnosis, changes: RecipeChanges) -> Remedy:
    (found,) = [r for r in golden.remedies if r.changes == changes]
    return found


def test_both_numbers_of_the_authors_sentence_are_read(golden: Diagnosis) -> None:
    assert golden.accounts.requested_bytes == 932 * MIB
    assert golden.accounts.allocated_bytes == pytest.approx(59.36 * GIB, abs=PRINT)


def test_sharding_was_active(golden: Diagnosis) -> None:
    assert golden.sharded is Sharded.YES
    assert "sharding unit of its own" in golden.sharded_evidence[0]


def test_the_request_is_one_decoder_layer_in_bfloat16_and_nothing_else(golden: Diagnosis) -> None:
    (request,) = golden.request
    assert (request.role, request.dtype, request.match) == (Role.LAYER, "bfloat16", Match.EXACT)
    assert request.size_bytes == 487_598_336 * 2


def test_it_stays_undecided_between_the_remaining_hypotheses(golden: Diagnosis) -> None:
    assert (golden.cause, golden.confidence) == (Cause.UNDECIDED, Confidence.UNDECIDED)
    left = [h for h in golden.hypotheses if h.strength is not Strength.EXCLUDED]
    assert {(h.what.split(":")[0], h.step) for h in left} == {
        ("sharded, gradient accumulation without reduction (no_sync)", 1),
        ("sharded, float32 state, optimizer without temporaries (fused)", 2),
        ("SHARD_GRAD_OP", 1),
    }


def test_accumulation_without_reduction_fits_at_1800_tokens_in_step_1(golden: Diagnosis) -> None:
    found = explanation(golden, "no_sync")
    assert found.tokens[0] == pytest.approx(1800, abs=10)
    assert found.predicted_allocated_bytes == pytest.approx(59.36 * GIB, abs=PRINT)
    assert any("first" in text or "step 1" in text for text in found.reasons)


def test_fused_float32_state_fits_at_1974_tokens_in_step_2(golden: Diagnosis) -> None:
    found = explanation(golden, "without temporaries")
    assert found.cause is Cause.FP32_UPCAST
    assert found.tokens[0] == pytest.approx(1974, abs=10)
    assert found.predicted_allocated_bytes == pytest.approx(59.36 * GIB, abs=PRINT)


def test_shard_grad_op_is_possible_only_through_the_environment(golden: Diagnosis) -> None:
    found = explanation(golden, "SHARD_GRAD_OP")
    assert any("FSDP_SHARDING_STRATEGY" in text for text in found.objections)


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("units = 0", Cause.NOT_SHARDED),
        ("wrap too coarse", Cause.WRAP_TOO_COARSE),
        ("whole model on the card, then wrapped", Cause.NOT_SHARDED),
        ("foreach", Cause.OPTIMIZER_TEMPORARIES),
        ("over 7 ranks", Cause.FP32_UPCAST),
        ("bfloat16 state", Cause.CAPACITY),
    ],
)
def test_impossible_scenarios_are_excluded_with_a_reason(
    golden: Diagnosis, words: str, cause: Cause
) -> None:
    found = explanation(golden, words)
    assert (found.strength, found.cause) == (Strength.EXCLUDED, cause)
    assert found.objections


def test_a_replica_is_excluded_by_220_mebibytes(golden: Diagnosis) -> None:
    found = explanation(golden, "then wrapped")
    assert found.predicted_allocated_bytes == pytest.approx(59.575 * GIB, abs=PRINT)


def test_the_default_optimizer_fails_in_the_first_update_with_small_requests(
    golden: Diagnosis,
) -> None:
    found = explanation(golden, "foreach")
    assert found.where == "step 1 optimizer_step"
    assert found.predicted_request_bytes is not None
    assert found.predicted_request_bytes <= 372 * MIB


def test_the_measurement_that_decides_is_named(golden: Diagnosis) -> None:
    assert golden.next_measurement is not None
    assert "progress bar" in golden.next_measurement
    assert "step 2 backward means" in golden.next_measurement


def test_the_coincidence_of_eight_ranks_is_explained(golden: Diagnosis) -> None:
    assert any("cannot tell a sharded job from an unsharded one" in note for note in golden.notes)


def test_the_arithmetic_says_that_the_job_does_not_fit(golden: Diagnosis) -> None:
    assert golden.needs is not None
    assert golden.planned is not None
    assert golden.needs.rank_state_bytes == pytest.approx(59.575 * GIB, abs=PRINT)
    assert golden.planned.fused_peak_bytes == pytest.approx(63.56 * GIB, rel=0.001)
    assert golden.planned.peak_bytes == pytest.approx(74.47 * GIB, rel=0.001)


@pytest.mark.parametrize(
    ("changes", "on_eight", "on_seven"),
    [
        ({"optimizer_in_backward": True}, 50.15, 56.53),
        ({"optimizer": "adamw_bf16", "parameters": "bfloat16"}, 33.95, 38.18),
        ({"optimizer": "adamw_8bit"}, 41.34, 46.62),
        ({"optimizer": "adafactor"}, 33.77, 37.98),
    ],
)
def test_recipes_that_fit_eight_and_seven_cards_are_offered(
    golden: Diagnosis, changes: RecipeChanges, on_eight: float, on_seven: float
) -> None:
    found = remedy(golden, changes)
    assert found.verdict == "fits"
    assert found.predicted_peak_bytes == pytest.approx(on_eight * GIB, rel=0.002)
    assert found.one_rank_less is not None
    assert found.one_rank_less.ranks == 7
    assert found.one_rank_less.verdict == "fits"
    assert found.one_rank_less.predicted_peak_bytes == pytest.approx(on_seven * GIB, rel=0.002)


def test_full_offload_is_rejected_for_lack_of_host_memory(golden: Diagnosis) -> None:
    found = remedy(golden, {"offload": "all"})
    assert found.verdict == "does_not_fit"
    assert "host needs" in found.costs


def test_reducing_every_micro_batch_alone_does_not_suffice(golden: Diagnosis) -> None:
    (found,) = [r for r in golden.remedies if "sync_each_batch" in r.change]
    assert found.verdict == "does_not_fit"


@pytest.mark.parametrize(
    "log",
    [
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 932.00 MiB. GPU 0 has a total "
        "capacity of 63.98 GiB of which 412.00 MiB is free. Of the allocated memory 59.36 GiB is "
        "allocated by PyTorch, and 480.11 MiB is reserved by PyTorch but unallocated.",
        "HIP out of memory. Tried to allocate 932.00 MiB. Of the allocated memory 59.36 GiB is "
        "allocated by PyTorch",
    ],
)
def test_the_message_as_torch_prints_it_leads_to_the_same_answer(
    golden: Diagnosis, log: str
) -> None:
    printed = diagnose(Case.from_dict({**CASE, "log": log}))
    assert (printed.cause, printed.sharded) == (golden.cause, golden.sharded)
    assert {h.what for h in printed.hypotheses} == {h.what for h in golden.hypotheses}


def test_a_progress_bar_in_the_log_decides(golden: Diagnosis) -> None:
    bar = "  0%|          | 1/1250 [00:21<7:24:11, 21.34s/it]\n"
    stated = diagnose(Case.from_dict({**CASE, "log": bar + CASE["log"]}))
    assert (stated.cause, stated.confidence) == (Cause.FP32_UPCAST, Confidence.LIKELY)
    assert golden.cause is Cause.UNDECIDED


def test_a_stated_accumulation_of_one_excludes_unreduced_gradients() -> None:
    stated = diagnose(Case.from_dict({**CASE, "gradient_accumulation_steps": 1}))
    left = [h for h in stated.hypotheses if h.strength is not Strength.EXCLUDED]
    assert not any("no_sync" in h.what for h in left)
