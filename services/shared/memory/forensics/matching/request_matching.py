"""Match the size that an allocator printed to the tensors that would request it.

What is printed is the size asked from the driver, not the tensor's: the allocator rounds it first
(`rounding`). Candidates are ranked by how well they match, then by what fails in the named phase.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from services.shared.memory.architecture.shape import Shape
from services.shared.memory.forensics.matching.activation_buffers import (
    activation_candidates,
    larger_batches,
    solved_activations,
)
from services.shared.memory.forensics.matching.candidates import (
    Candidate,
    Match,
    Role,
    Workload,
)
from services.shared.memory.forensics.matching.parameter_buffers import (
    parameter_candidates,
    table_name,
)
from services.shared.memory.forensics.matching.rounding import Rounding, is_segment_size
from services.shared.memory.oom_log.message_parser import PrintedSize
from services.shared.memory.sizes import MIB

_MOST_ADDED_TOKENS = 64  # a tokenizer gains a few special tokens; more is another vocabulary
_ROLE_ORDER = list(Role)
_MATCH_ORDER = list(Match)


def match_request(
    requested: PrintedSize,
    shape: Shape | None,
    *,
    workload: Workload,
    rounding: Rounding | None = None,
    expected: Iterable[Role] = (),
) -> tuple[Candidate, ...]:
    """Return every tensor of the job that prints as `requested`, the best match first.

    Equal matches of an `expected` role, one that is allocated where the job failed, come first.
    Empty for 2.00 and 20.00 MiB, the sizes of segments, which identify no tensor.
    """
    rounding = rounding or Rounding()
    if is_segment_size(requested, rounding):
        return ()
    fixed = (*parameter_candidates(shape, workload), *activation_candidates(shape, workload))
    found = [c for c in fixed if requested.covers(rounding.driver_request(c.size_bytes))]
    sure = Match.EXACT if requested.tolerance_bytes < MIB else Match.WITHIN_ROUNDING
    candidates = [_with_match(c, sure, requested) for c in _distinct(found)]
    if not candidates:
        # A multiple of one text's logits has to be exact to say something.
        solved = sure if sure is Match.EXACT else Match.LOOSE
        candidates = [
            _with_match(c, solved, requested)
            for c in larger_batches(shape, workload)
            if requested.covers(rounding.driver_request(c.size_bytes))
        ]
    if not any(c.role is Role.EMBEDDING and c.divided_by == 1 for c in candidates):
        candidates += _grown_vocabulary(requested, shape, rounding, sure)
    if not any(c.tokens for c in candidates):
        candidates += solved_activations(requested, shape, workload, rounding)
    first = frozenset(expected)
    return tuple(sorted(candidates, key=lambda candidate: _rank_key(candidate, first)))


def _distinct(found: Iterable[Candidate]) -> list[Candidate]:
    """Return the candidates with each size, dtype and role once; names of one weight count as one role."""
    kept: dict[tuple[int, str, int, Role | None], Candidate] = {}
    for candidate in found:
        weights = candidate.role in _ONE_TENSOR
        role = None if weights else candidate.role
        key = (candidate.size_bytes, candidate.dtype, candidate.divided_by, role)
        kept.setdefault(key, candidate)
    return list(kept.values())


_ONE_TENSOR = (Role.EMBEDDING, Role.WEIGHT, Role.GROUP, Role.FUSED_WEIGHTS)


def _with_match(candidate: Candidate, match: Match, requested: PrintedSize) -> Candidate:
    # Round numbers of tokens, heads and widths all multiply to powers of two.
    power_of_two = requested.size_bytes & (requested.size_bytes - 1) == 0
    return replace(candidate, match=match, ambiguous=power_of_two)


def _rank_key(candidate: Candidate, expected: frozenset[Role]) -> tuple[int, bool, int, int, str]:
    return (
        _MATCH_ORDER.index(candidate.match),
        candidate.role not in expected,
        _ROLE_ORDER.index(candidate.role),
        candidate.divided_by,
        candidate.what,
    )


def _grown_vocabulary(
    requested: PrintedSize, shape: Shape | None, rounding: Rounding, sure: Match
) -> list[Candidate]:
    """Return the embedding with a few tokens added, such as a padding token, if that matches."""
    if shape is None or sure is not Match.EXACT:
        return []
    for added in range(1, _MOST_ADDED_TOKENS + 1):
        rows = shape.dims.vocab_size + added
        for dtype, size in (("bfloat16", 2), ("float32", 4)):
            size_bytes = rows * shape.dims.hidden_size * size
            if requested.covers(rounding.driver_request(size_bytes)):
                text = f"{table_name(shape)} weight with {added} token{'s' * (added > 1)} added"
                return [Candidate(Role.EMBEDDING, text, size_bytes, dtype, sure)]
    return []
