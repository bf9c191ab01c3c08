"""Requests of units, partitions, buckets and micro-batches, to the precision of the print."""

from typing import Any

import pytest

from services.shared.memory.architecture.shape import Shape, from_preset
from services.shared.memory.forensics.matching.candidates import (
    Candidate,
    Match,
    Role,
    Workload,
)
from services.shared.memory.forensics.matching.request_matching import match_request
from services.shared.memory.forensics.matching.rounding import Rounding
from services.shared.memory.oom_log.message_parser import read_printed_size
from services.shared.memory.sizes import MIB, format_size

LLAMA_7B = from_preset("llama-7b").with_language_head()
QWEN3_06B = from_preset("qwen3-0.6b").with_language_head()


def matched(size: str, shape: Shape | None, **workload: Any) -> tuple[Candidate, ...]:
    return match_request(read_printed_size(size), shape, workload=Workload(**workload))


def printed(size_bytes: int) -> str:
    return format_size(Rounding().driver_request(size_bytes))


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
def test_embedding_and_head_of_one_unit_together(dtype: str, size: int) -> None:
    found = matched(printed(2 * 32_000 * 4096 * size), LLAMA_7B)
    assert any(c.what.startswith("embedding and output") and c.dtype == dtype for c in found)


def test_the_projections_of_one_mlp_together() -> None:
    found = matched(printed(3 * 4096 * 11_008 * 4), LLAMA_7B)
    assert [(c.role, c.dtype) for c in found if c.role is Role.GROUP] == [(Role.GROUP, "float32")]


def test_a_partition_of_zero_is_a_share_of_all_parameters() -> None:
    partition = 4 * LLAMA_7B.num_parameters // 8
    (best, *_) = matched(printed(partition), LLAMA_7B, ranks=8, zero=True)
    assert (best.role, best.divided_by, best.dtype) == (Role.MODEL, 8, "float32")


@pytest.mark.parametrize(
    ("elements", "what"),
    [
        (500_000_000, "ZeRO bucket of 500,000,000 elements"),
        (4096 * 4096, 'ZeRO reduce bucket that "auto" sets'),
        (9 * 4096 * 4096 // 10, 'ZeRO prefetch bucket that "auto" sets'),
    ],
)
def test_buckets_of_zero_by_default_and_by_auto(elements: int, what: str) -> None:
    found = matched(printed(2 * elements), LLAMA_7B, ranks=8, zero=True)
    assert what in {c.what for c in found}


def test_zero_3_updates_in_sub_groups() -> None:
    found = matched("3.73 GiB", None, ranks=2, zero=True, num_parameters=8_000_000_000)
    assert "ZeRO-3 sub-group of 1,000,000,000 elements" in {c.what for c in found}


def test_the_first_bucket_of_ddp_holds_every_gradient() -> None:
    (best, *_) = matched("25.10 GiB", LLAMA_7B, ranks=2, replicates=True)
    assert (best.role, best.dtype, best.size_bytes) == (
        Role.MODEL,
        "float32",
        4 * LLAMA_7B.num_parameters,
    )


def test_a_bucket_of_ddp_closes_at_25_mib() -> None:
    # Backwards, after the first bucket: up and gate projection, two norms of the attention, and the
    # output projection, with which the bucket passes 25 MiB.
    elements = 2 * 3072 * 1024 + 2 * 128 + 2048 * 1024
    found = matched(printed(4 * elements), QWEN3_06B, ranks=4, replicates=True)
    assert any(c.role is Role.BUCKET and "DDP" in c.what for c in found)
    assert not any(c.role is Role.BUCKET for c in matched(printed(4 * elements), QWEN3_06B))


def test_logits_are_found_where_the_micro_batch_is_not_given() -> None:
    found = matched(printed(3 * 2000 * 32_000 * 4), LLAMA_7B, sequence_length=2000)
    exact = [c for c in found if c.match is Match.EXACT]
    assert (Role.LOGITS, 6000, "float32") in {(c.role, c.tokens, c.dtype) for c in exact}


def test_attention_scores_are_found_where_the_micro_batch_is_not_given() -> None:
    found = matched(printed(6 * 32 * 1500 * 1500 * 2), LLAMA_7B, sequence_length=1500)
    assert any(c.role is Role.SCORES and c.tokens == 9000 for c in found)


def test_shifted_logits_of_a_causal_loss_are_one_position_shorter() -> None:
    shifted = 16 * 511 * 151_936 * 4
    found = matched(printed(shifted), QWEN3_06B, micro_batch=16, sequence_length=512)
    assert any(c.what.startswith("shifted logits") for c in found)


def test_quantised_weights_are_packed() -> None:
    found = matched(printed(4096 * 11_008), LLAMA_7B, bits=8)
    assert any(c.role is Role.PACKED and c.dtype == "int8" for c in found)


def test_what_is_allocated_in_the_phase_comes_first() -> None:
    size = read_printed_size(
        printed(32_000 * 4096 * 2)
    )  # also 2 KiB of logits for each of 2048 tokens
    workload = Workload(micro_batch=1, sequence_length=2048)
    loss = match_request(size, LLAMA_7B, workload=workload, expected=(Role.LOGITS,))
    load = match_request(size, LLAMA_7B, workload=workload, expected=(Role.EMBEDDING,))
    assert load[0].role is Role.EMBEDDING
    assert {c.role for c in loss} == {c.role for c in load}


def test_a_request_in_mebibytes_is_matched_to_two_of_them() -> None:
    weight = 4096 * 11_008 * 2
    assert matched(format_size(Rounding().driver_request(weight)), LLAMA_7B)
    nearby = Rounding().driver_request(weight) + 2 * MIB
    assert not [c for c in matched(format_size(nearby), LLAMA_7B) if c.match is Match.EXACT]
