"""How the device's memory was divided when the request failed, from the printed numbers."""

from __future__ import annotations

from dataclasses import dataclass

from services.shared.memory.oom_log.message_parser import Message, bytes_of
from services.shared.memory.sizes import GIB

# Context, libraries and collectives of one process: 0.1 to 2.3 GiB in 27 of 33 public messages
# that allow the subtraction (2026-11); beyond this another process uses the device.
USUAL_OUTSIDE_BYTES = int(2.5 * GIB)
# WSL2 prints an overflowed 2**64 here; no card of today holds a pebibyte.
_ABSURD_BYTES = 1 << 50


@dataclass(frozen=True)
class Accounts:
    """The device's memory in bytes; a part that cannot be computed from the message is None.

    `outside_bytes` is neither held by torch's allocator nor free: this process's context and
    collectives and, where the message has no process sentence, other processes too.
    """

    requested_bytes: int | None = None
    total_bytes: int | None = None
    allocated_bytes: int | None = None
    cached_bytes: int | None = None  # reserved by the allocator, free inside it
    free_bytes: int | None = None
    allowed_bytes: int | None = None
    outside_bytes: int | None = None
    other_processes_bytes: int | None = None  # known to belong to other processes
    usual_outside_bytes: int = USUAL_OUTSIDE_BYTES  # context and collectives of this kind of card

    @property
    def usable_bytes(self) -> int | None:
        """Return what torch could have used at most: the total less what is outside of torch."""
        if self.total_bytes is None or self.outside_bytes is None:
            return None
        return self.total_bytes - self.outside_bytes

    @property
    def foreign_bytes(self) -> int:
        """Return the bytes used beyond this process and its usual overhead.

        Less than a gibibyte may be rounding or another context, and counts as zero.
        """
        beyond = max(0, (self.outside_bytes or 0) - self.usual_outside_bytes)
        foreign = max(self.other_processes_bytes or 0, beyond)
        return foreign if foreign >= GIB else 0

    @property
    def fits_if_defragmented(self) -> bool | None:
        """Return whether the request would fit if the free memory were contiguous."""
        if self.usable_bytes is None or self.allocated_bytes is None:
            return None
        return self.allocated_bytes + (self.requested_bytes or 0) <= self.usable_bytes


def read_accounts(
    message: Message, *, total_bytes: int | None = None, usual_outside_bytes: int = 0
) -> Accounts:
    """Return the accounts of `message`; `total_bytes` is used where it does not print the total.

    `usual_outside_bytes` is what this kind of device is known to use outside of torch.
    """
    total = bytes_of(message.total) or total_bytes or bytes_of(message.allowed)
    allocated, free = bytes_of(message.allocated), bytes_of(message.free)
    cached = bytes_of(message.unallocated)
    if cached is None and message.reserved and allocated is not None:
        cached = max(0, message.reserved.size_bytes - allocated)
    pools = bytes_of(message.private_pools) or 0
    torch_bytes = None if allocated is None or cached is None else allocated + cached + pools
    outside = None
    if total is not None and free is not None and torch_bytes is not None:
        outside = max(0, total - free - torch_bytes)
    return Accounts(
        requested_bytes=bytes_of(message.requested),
        total_bytes=total,
        allocated_bytes=allocated,
        cached_bytes=cached,
        free_bytes=free,
        allowed_bytes=bytes_of(message.allowed),
        outside_bytes=outside,
        other_processes_bytes=_elsewhere(message, total, free, torch_bytes),
        usual_outside_bytes=max(USUAL_OUTSIDE_BYTES, usual_outside_bytes),
    )


def _elsewhere(
    message: Message, total: int | None, free: int | None, torch_bytes: int | None
) -> int | None:
    process = bytes_of(message.process)
    if process is not None and not 0 < process < _ABSURD_BYTES:
        process = None  # a container's pid namespace prints 0, WSL2 an overflow
    if process is not None and total is not None and free is not None:
        return max(0, total - free - process)
    others = [other.size_bytes for other in message.others if other.size_bytes < _ABSURD_BYTES]
    if process is None and others and max(others) >= (torch_bytes or 0):
        # Without a sentence of its own, the largest "other" process is the job in its container.
        others.remove(max(others))
    return sum(others) if others else None
