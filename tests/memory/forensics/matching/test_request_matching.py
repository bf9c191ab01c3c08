"""Matching a printed request to the tensors that would request it."""

from typing import Any

import pytest

from services.shared.memory.architecture.shape import Shape, from_preset
from services.shared.memory.forensics.matching.candidates import Candidate, Match, Role, Workload
from services.shared.memory.forensics.matching.request_matching import match_request
from services.shared.memory.forensics.matching.rounding import Rounding
from services.shared.memory.oom_log.message_formats import Backend
from services.shared.memory.oom_log.message_parser import read_printed_size
from services.shared.memory.sizes import GIB, MIB

LLAMA_7B = from_preset("llama-7b").with_language_head()
QWEN3_32B = from_preset("qwen3-32b", heads=(3, 7))


def matched(size: str, shape: Shape | None, **workload: Any) -> tuple[Candidate, ...]:
    return match_request(read_printed_size(size), shape, workload=Workload(**workload))


@pytest.mark.parametrize(
    ("size_bytes", "request_bytes"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (404_766_720, 388 * MIB),
        (384 * MIB, 384 * MIB),
    ],
)
def test_the_allocator_asks_the_driver_for_whole_segments(
    size_bytes: int, request_bytes: int
) -> None:
    assert Rounding().driver_request(size_bytes) == request_bytes


def test_ascend_adds_its_padding_before_rounding() -> None:
    assert Rounding(Backend.NPU).driver_request(384 * MIB) == 386 * MIB


def test_the_host_allocator_asks_for_exact_bytes() -> None:
    assert Rounding(Backend.HOST).driver_request(268_435_457) == 268_435_457


def test_power_of_two_divisions_round_up_to_the_next_division() -> None:
    rounding = Rounding(power2_divisions=4)
    assert rounding.driver_request(1200 * MIB) == 1280 * MIB
    assert rounding.driver_request(1024 * MIB) == 1024 * MIB


def test_the_golden_request_is_one_decoder_layer_in_bfloat16_and_nothing_else() -> None:
    candidates = matched("932.00 MiB", QWEN3_32B, ranks=8)
    assert [(c.role, c.dtype, c.divided_by, c.match) for c in candidates] == [
        (Role.LAYER, "bfloat16", 1, Match.EXACT)
    ]
    assert candidates[0].size_bytes == 487_598_336 * 2


def test_a_share_is_recognised_by_the_number_of_ranks() -> None:
    (best, *_) = matched("98.00 MiB", LLAMA_7B, ranks=8)
    assert (best.role, best.dtype, best.divided_by) == (Role.LAYER, "float32", 8)
    assert all(c.divided_by == 1 for c in matched("98.00 MiB", LLAMA_7B, ranks=5))


def test_an_added_padding_token_shows_in_the_size_of_the_embedding() -> None:
    candidates = matched("502.00 MiB", LLAMA_7B)
    grown = next(c for c in candidates if "1 token added" in c.what)
    assert (grown.size_bytes, grown.match) == (32_001 * 4096 * 4, Match.EXACT)


def test_a_power_of_two_is_reported_as_ambiguous() -> None:
    candidates = matched("64.00 MiB", LLAMA_7B)
    assert candidates[0].role is Role.WEIGHT
    assert all(c.ambiguous for c in candidates if c.match is Match.EXACT)


def test_gibibytes_are_too_coarse_for_an_exact_match() -> None:
    gemma = from_preset("gemma-3-27b").with_language_head()
    best = matched("2.63 GiB", gemma, ranks=16)[0]
    assert (best.role, best.match) == (Role.ROOT, Match.WITHIN_ROUNDING)


def test_tokens_are_solved_from_logits_only_loosely() -> None:
    qwen = from_preset("qwen2.5-32b").with_language_head()
    (logits, *_) = matched("9.37 GiB", qwen, ranks=8, micro_batch=1, sequence_length=32768)
    assert (logits.role, logits.match) == (Role.LOGITS, Match.LOOSE)
    assert logits.tokens == pytest.approx(16_540, abs=20)


def test_logits_of_the_given_tokens_match_exactly() -> None:
    candidates = matched("514.00 MiB", LLAMA_7B, micro_batch=2, sequence_length=2100)
    exact = [c for c in candidates if c.match is Match.EXACT]
    assert {(c.role, c.tokens) for c in exact} == {(Role.LOGITS, 4200)}


@pytest.mark.parametrize("size", ["2.00 MiB", "20.00 MiB", "512.00 KiB"])
def test_segment_sizes_name_no_tensor(size: str) -> None:
    assert matched(size, LLAMA_7B, ranks=8) == ()


def test_without_a_shape_the_number_of_parameters_still_matches_one_buffer() -> None:
    candidates = matched("21.06 GiB", None, num_parameters=11_307_321_344)
    assert [(c.role, c.dtype) for c in candidates] == [(Role.MODEL, "bfloat16")]


def test_without_a_shape_and_parameters_nothing_is_guessed() -> None:
    assert matched("948.00 MiB", None, ranks=8) == ()


def test_a_zero_bucket_is_recognised_where_zero_runs() -> None:
    assert any(c.role is Role.BUCKET for c in matched("954.00 MiB", LLAMA_7B, zero=True))


def test_every_layer_of_every_rank_count_is_found_again() -> None:
    for ranks in (2, 3, 4, 6, 7, 8, 16):
        size = -(-LLAMA_7B.layers[0].elements // ranks) * 4
        requested = Rounding().driver_request(size)
        if requested >= GIB:
            continue
        candidates = matched(f"{requested / MIB:.2f} MiB", LLAMA_7B, ranks=ranks)
        assert any(c.size_bytes == size and c.match is Match.EXACT for c in candidates)
