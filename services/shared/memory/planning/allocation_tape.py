"""A tape of allocations: what autograd keeps and frees, operation by operation, without a tensor.

A layer is described once as the sequence of operations that PyTorch runs. Played forward, the tape
counts bytes as they are allocated, held by Python names, saved for backward and freed; played
backward, it visits the operations in reverse order as the autograd engine does, allocating
gradients and releasing what was saved. The rules come from torch 2.5 and 2.13 (`derivatives.yaml`,
`engine.cpp`, `input_buffer.cpp`) and were checked against traced runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# torch's caching allocator counts in blocks of 512 bytes (c10/cuda/CUDACachingAllocator.cpp).
ALLOCATION_BYTES = 512


def rounded(size_bytes: int) -> int:
    """Return the bytes that an allocation of `size_bytes` counts for."""
    return -(-size_bytes // ALLOCATION_BYTES) * ALLOCATION_BYTES


_NEVER_FREED = 1 << 30


class Moment(NamedTuple):
    """A new maximum: bytes alive, of which weight gradients, and the request that made it so."""

    live_bytes: int
    request_bytes: int
    what: str
    weight_gradient_bytes: int = 0


class Value:
    """A tensor on the tape: a storage with a count of its holders, or a view of another one."""

    __slots__ = ("base", "holders", "size_bytes", "what")

    def __init__(self, size_bytes: int, what: str, base: Value | None = None) -> None:
        self.size_bytes = size_bytes
        self.what = what
        self.base = base
        self.holders = 1


class Gradient(NamedTuple):
    """The gradient of an operation for one input: a new tensor, or the gradient of its own output.

    `extra_bytes` are alive only while it is computed; with `alias` the incoming gradient is passed on.
    Where an operation promotes its input, the gradient is first made in `wide_bytes` and then cast.
    """

    of: Value
    size_bytes: int = 0
    extra_bytes: Sequence[int] = ()
    alias: bool = False
    wide_bytes: int = 0


@dataclass
class _Node:
    what: str
    outs: Sequence[Value]
    gradients: Sequence[Gradient]
    weight_bytes: Sequence[int] = ()
    saved: list[Value] = field(default_factory=list)


class Tape:
    """Counts the bytes of one module's forward pass and, where `saving`, of its backward pass.

    Weight gradients stay alive, unless `adding`: then each is added to one that exists already.
    What was `recomputed` is released by the function that reads it, before the engine casts its results.
    `records` are the moments at which more bytes were alive than ever before: for any budget, the
    request that first exceeds it is one of them.
    """

    def __init__(self, *, saving: bool, adding: bool = False, recomputed: bool = False) -> None:
        self._adding = adding
        self._recomputed = recomputed
        self.live_bytes = 0
        self.weight_gradient_bytes = 0
        self.records: list[Moment] = []
        self._most_bytes = 0
        self._saving = saving
        self._nodes: list[_Node] = []
        self._held: list[Value] = []

    def reset_records(self) -> None:
        """Clear the records, so that the next ones describe only what follows."""
        self.records = []
        self._most_bytes = 0

    def external(self, size_bytes: int, what: str) -> Value:
        """Return a value that the caller owns: the tape neither counts nor frees it."""
        value = Value(size_bytes, what)
        value.holders = _NEVER_FREED
        return value

    def op(
        self,
        what: str,
        out_bytes: int,
        gradients: Sequence[Gradient] = (),
        *,
        saves: Sequence[Value] = (),
        saves_out: bool = False,
        also_saves: Sequence[int] = (),
        weight_bytes: Sequence[int] = (),
        extra_bytes: Sequence[int] = (),
    ) -> Value:
        """Run one operation and return its output, which one Python name holds.

        `also_saves` are outputs that only backward sees (a mask, a log-sum-exp); `extra_bytes` live
        together during the forward kernel.
        """
        out = self._allocate(out_bytes, what)
        hidden = [self._allocate(size, what) for size in also_saves]
        self.during(what, extra_bytes)
        if self._saving and gradients:
            node = _Node(what, (out,), gradients, weight_bytes)
            for value in (*saves, *((out,) if saves_out else ())):
                value.holders += 1
                node.saved.append(value)
            node.saved += hidden
            self._nodes.append(node)
        else:
            self.drop(*hidden)
        return out

    def split(self, what: str, base: Value, sizes: Sequence[int]) -> list[Value]:
        """Return views of `base`: nothing is allocated until their gradients are concatenated."""
        views = [Value(size, what, base) for size in sizes]
        base.holders += len(views)
        if self._saving:
            self._nodes.append(_Node(what, views, [Gradient(base, base.size_bytes)]))
        return views

    def during(self, what: str, sizes: Sequence[int]) -> None:
        """Count temporaries that are alive together for one moment."""
        self.drop(*[self._allocate(size, what) for size in sizes])

    def drop(self, *values: Value) -> None:
        """Release values: each is freed when nothing else holds it."""
        for value in values:
            value.holders -= 1
            if value.holders == 0 and value.base is None:
                self.live_bytes -= value.size_bytes
            elif value.holders == 0 and value.base is not None:
                self.drop(value.base)

    def hold(self, value: Value) -> None:
        """Leave a value to a name of the module's own, which outlives the function that made it."""
        self._held.append(value)

    def release_held(self) -> None:
        """Release what was held: the module has returned."""
        self.drop(*self._held)
        self._held.clear()

    def play_backward(self, out: Value, gradient: Value) -> None:
        """Run the recorded operations in reverse, releasing `gradient`, which is that of `out`.

        The gradient of the external input stays alive, as the next module's incoming one.
        """
        gradients = {out: gradient}
        for node in reversed(self._nodes):
            incoming = [gradients.pop(value) for value in node.outs if value in gradients]
            if incoming:
                self._backward(node, incoming, gradients)
        self._nodes.clear()

    def _backward(self, node: _Node, incoming: list[Value], gradients: dict[Value, Value]) -> None:
        what = f"{node.what} backward"
        added: list[Value] = []
        for size in node.weight_bytes:
            self.weight_gradient_bytes += rounded(size)
            weight = self._allocate(size, f"{node.what} weight gradient")
            if self._adding:
                self.weight_gradient_bytes -= weight.size_bytes
                added.append(weight)
        results: list[tuple[Value, Value]] = []
        for gradient in node.gradients:
            if gradient.alias:
                incoming[0].holders += 1
                results.append((gradient.of, incoming[0]))
                continue
            if gradient.wide_bytes:
                results.append((gradient.of, self._cast_gradient(node, gradient)))
                continue
            results.append((gradient.of, self._allocate(gradient.size_bytes, what)))
            self.during(what, gradient.extra_bytes)
        self.drop(*incoming, *node.saved, *added)
        for target, value in results:
            self._accumulate(target, value, gradients)

    def _cast_gradient(self, node: _Node, gradient: Gradient) -> Value:
        what = f"{node.what} backward"
        sizes = (gradient.wide_bytes, *gradient.extra_bytes)
        temporaries = [self._allocate(size, what) for size in sizes]
        if self._recomputed:
            self.drop(*node.saved)
            node.saved.clear()
        result = self._allocate(gradient.size_bytes, what)
        self.drop(*temporaries)
        return result

    def _accumulate(self, target: Value, value: Value, gradients: dict[Value, Value]) -> None:
        """Add a second gradient of the same value into a third tensor, as the engine does."""
        before = gradients.get(target)
        if before is None:
            gradients[target] = value
            return
        gradients[target] = self._allocate(value.size_bytes, "sum of gradients")
        self.drop(before, value)

    def _allocate(self, size_bytes: int, what: str) -> Value:
        value = Value(rounded(size_bytes), what)
        self.live_bytes += value.size_bytes
        if self.live_bytes > self._most_bytes:
            self._most_bytes = self.live_bytes
            moment = Moment(self.live_bytes, value.size_bytes, what, self.weight_gradient_bytes)
            self.records.append(moment)
        return value
