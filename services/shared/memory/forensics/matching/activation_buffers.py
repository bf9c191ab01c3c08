"""Sizes that activations request: logits, attention scores, hidden states."""

from __future__ import annotations

from collections.abc import Iterator

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.forensics.matching.candidates import (
    Candidate,
    Match,
    Role,
    Workload,
)
from services.shared.memory.forensics.matching.rounding import Rounding
from services.shared.memory.oom_log.message_parser import PrintedSize
from services.shared.memory.sizes import MIB

_DTYPES = (("bfloat16", 2), ("float32", 4))
_MOST_TEXTS = 64  # of a micro-batch, where it is not given
# Fewer tokens than this are no evidence: in steps of 2 MiB any request has a solution.
_FEWEST_TOKENS = 256


def activation_candidates(shape: Shape | None, workload: Workload) -> Iterator[Candidate]:
    """Yield the activations of the given micro-batch, or of a single text where it is not given."""
    if workload.sequence_length is None:
        return
    batch = workload.micro_batch or 1
    yield from _logits_and_scores(shape, workload, batch)
    if shape is None:
        return
    tokens, dims = batch * workload.sequence_length, shape.dims
    widths = (
        ("MLP activation", dims.intermediate_size),
        ("query activation", dims.query_size),
        ("hidden states", dims.hidden_size),
    )
    for dtype, size in _DTYPES:
        for what, width in widths:
            text = f"{what} of {tokens:,} tokens"
            yield Candidate(Role.ACTIVATION, text, tokens * width * size, dtype, tokens=tokens)


def larger_batches(shape: Shape | None, workload: Workload) -> Iterator[Candidate]:
    """Yield logits and scores of two to 64 texts where the micro-batch is not given."""
    if workload.sequence_length is None or workload.micro_batch is not None:
        return
    for batch in range(2, _MOST_TEXTS + 1):
        yield from _logits_and_scores(shape, workload, batch)


def _logits_and_scores(shape: Shape | None, workload: Workload, batch: int) -> Iterator[Candidate]:
    length = workload.sequence_length or 0
    vocabulary, tokens = vocabulary_of(shape, workload), batch * length
    for dtype, size in _DTYPES:
        if vocabulary:
            text = f"logits of {tokens:,} tokens ({batch} x {length})"
            yield Candidate(Role.LOGITS, text, tokens * vocabulary * size, dtype, tokens=tokens)
            # A causal loss drops the last position of each text and makes a copy of the rest.
            shifted = (tokens - batch) * vocabulary * size
            text = f"shifted logits of {tokens - batch:,} tokens ({batch} x {length - 1})"
            yield Candidate(Role.LOGITS, text, shifted, dtype, tokens=tokens)
        if shape is not None:
            heads = shape.dims.num_heads
            text = f"attention scores of {batch} x {heads} heads x {length} x {length}"
            scores = batch * heads * length * length * size
            yield Candidate(Role.SCORES, text, scores, dtype, tokens=tokens)


def vocabulary_of(shape: Shape | None, workload: Workload) -> int | None:
    """Return the width of the logits: of the language head, or as stated; None for classifiers."""
    if shape is not None and shape.language_head:
        return shape.dims.vocab_size
    return workload.vocab_size


def solved_activations(
    requested: PrintedSize, shape: Shape | None, workload: Workload, rounding: Rounding
) -> list[Candidate]:
    """Return logits and scores of this size for tokens that were not given: loose, as any size solves."""
    found = _solved_logits(requested, shape, workload)
    return [*found, *_solved_scores(requested, shape, rounding)]


def _solved_logits(
    requested: PrintedSize, shape: Shape | None, workload: Workload
) -> list[Candidate]:
    vocabulary = vocabulary_of(shape, workload)
    if not vocabulary:
        return []
    longest = (workload.sequence_length or 1 << 18) * (workload.micro_batch or _MOST_TEXTS)
    candidates = []
    for dtype, size in reversed(_DTYPES):
        tokens = requested.size_bytes // (vocabulary * size)
        if _FEWEST_TOKENS <= tokens <= longest:
            text = f"logits of about {tokens:,} tokens x {vocabulary:,} words"
            size_bytes = tokens * vocabulary * size
            candidates.append(Candidate(Role.LOGITS, text, size_bytes, dtype, tokens=tokens))
    return candidates


def _solved_scores(
    requested: PrintedSize, shape: Shape | None, rounding: Rounding
) -> list[Candidate]:
    """Return the scores of a round sequence length that have this size to the byte of the print."""
    if shape is None or requested.tolerance_bytes >= MIB:
        return []
    candidates = []
    for dtype, size in _DTYPES:
        for length in (1 << power for power in range(15, 8, -1)):
            one = shape.dims.num_heads * length**2 * size
            batch = round(requested.size_bytes / one)
            if 1 <= batch <= _MOST_TEXTS and requested.covers(rounding.driver_request(batch * one)):
                text = f"attention scores of {batch} x {length} x {length} tokens, all heads"
                tokens = batch * length
                candidates.append(
                    Candidate(Role.SCORES, text, batch * one, dtype, Match.LOOSE, tokens=tokens)
                )
                break
    return candidates
