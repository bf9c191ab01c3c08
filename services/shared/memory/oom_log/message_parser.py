"""Parse one out-of-memory message field by field.

Reporters break lines, cut sentences and reorder them, so no single expression covers a whole
message: each number is read by itself.
"""

import re
from dataclasses import dataclass

from services.shared.memory.oom_log.formats.table import OTHER_FORMATS
from services.shared.memory.oom_log.formats.text_format import TextFormat
from services.shared.memory.oom_log.message_formats import (
    BARE_OUT,
    DEVICE_INDEX,
    FIELDS,
    HEAD,
    MPS_ALLOCATED,
    MPS_ALLOWED,
    MPS_HEAD,
    MPS_OTHER,
    NUMBERS_ONLY,
    OTHER_PROCESS,
    PROSE_ALLOCATED,
    PROSE_OUT,
    PROSE_REQUESTED,
    Backend,
    MessageKind,
)
from services.shared.memory.sizes import GIB, KIB, MIB, TIB

# torch prints "GB" in MPS's older messages and people write it everywhere: all of them divide by
# powers of 1024 (c10 format_size, MPSAllocator.mm format_size, Ray's memory monitor).
_UNIT_BYTES = {"bytes": 1, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
_UNIT_BYTES |= {"p": TIB << 10, "e": TIB << 20}
_SIZE_PARTS = re.compile(
    r"([0-9]{1,15}(?:\.[0-9]{0,6})?)\s?(bytes|[KMGTPE](?=i?B))i?B?", re.ASCII | re.IGNORECASE
)
# The longest message of the catalogue is 900 characters without process sentences.
_LONGEST_MESSAGE = 2500
_EXCERPT = 400


@dataclass(frozen=True)
class PrintedSize:
    """A size as printed: the bytes it says and the rounding error of the print."""

    size_bytes: int
    tolerance_bytes: int

    def covers(self, size_bytes: int) -> bool:
        """Return whether `size_bytes` would have been printed as this size."""
        return abs(size_bytes - self.size_bytes) <= self.tolerance_bytes


def bytes_of(size: PrintedSize | None) -> int | None:
    """Return the bytes of a printed size, or None where it was not printed."""
    return size.size_bytes if size else None


@dataclass(frozen=True)
class Message:
    """The fields of one failure message; a field that was not printed is None."""

    format_id: str  # the catalogue's entry; "F3|F4" where the text fits several
    kind: MessageKind
    backend: Backend = Backend.UNKNOWN
    requested: PrintedSize | None = None
    total: PrintedSize | None = None
    allocated: PrintedSize | None = None
    reserved: PrintedSize | None = None
    unallocated: PrintedSize | None = None  # reserved by torch but not allocated
    free: PrintedSize | None = None
    process: PrintedSize | None = None  # all of this process, context included
    others: tuple[PrintedSize, ...] = ()  # "Process N has ... in use"
    allowed: PrintedSize | None = None
    private_pools: PrintedSize | None = None
    active: PrintedSize | None = None
    device_index: int | None = None
    rank: int | None = None
    text: str = ""

    @property
    def identity(self) -> tuple[object, ...]:
        """Return what identifies a failure, whichever rank printed it."""
        return (self.format_id, self.requested, self.total, self.allocated, self.unallocated)


def read_printed_size(text: str) -> PrintedSize:
    """Read "932.00 MiB" into bytes and half a unit of its last digit; ValueError otherwise."""
    found = _SIZE_PARTS.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text[:40]!r} is not a size such as '932.00 MiB' or '0 bytes'")
    digits, unit = found.groups()
    unit_bytes = _UNIT_BYTES[unit.lower()]
    decimals = len(digits.partition(".")[2])
    tolerance = 0 if unit_bytes == 1 else -(-unit_bytes // (2 * 10**decimals))
    return PrintedSize(round(float(digits) * unit_bytes), tolerance)


def read_message(text: str) -> Message | None:
    """Read the first failure message in `text`; None where there is none. Never raises.

    Line breaks inside the message are understood; rank prefixes are not (see `log_scanner`).
    """
    flat = " ".join(text.split())
    head = HEAD.search(flat)
    mps = MPS_HEAD.search(flat)
    if head and (mps is None or head.start() <= mps.start()):
        return _read_allocator(flat, head)
    if mps:
        return _read_mps(mps)
    for text_format in OTHER_FORMATS:
        found = text_format.expression.search(flat)
        if found is not None:
            return _read_text_format(flat, found, text_format)
    numbers = NUMBERS_ONLY.search(flat)
    if numbers:
        return _read_numbers_only(flat, numbers)
    return _read_prose(flat) or _read_bare(flat)


def _read_text_format(flat: str, found: re.Match[str], text_format: TextFormat) -> Message:
    groups = found.groupdict()
    resident = groups.get("resident_kib")
    exact = groups.get("tried") or groups.get("wanted")
    requested = PrintedSize(int(exact.replace(",", "")), 0) if exact else None
    if groups.get("size"):
        requested = read_printed_size(groups["size"])
    return Message(
        format_id=text_format.format_id,
        kind=text_format.kind,
        backend=text_format.backend,
        requested=_gibibytes(groups.get("wanted_gib")) or requested,
        total=_gibibytes(groups.get("total_gib")),
        allocated=read_printed_size(groups["held"].replace(",", ""))
        if groups.get("held")
        else None,
        free=_gibibytes(groups.get("free_gib")),
        process=PrintedSize(int(resident) * KIB, KIB) if resident else None,
        text=excerpt(flat, found.start() - 60),
    )


def _gibibytes(number: str | None) -> PrintedSize | None:
    return read_printed_size(f"{number} GiB") if number else None


def excerpt(flat: str, start: int, length: int = _EXCERPT) -> str:
    """Return about `length` characters of `flat` from `start`, cut between words."""
    start = max(0, start)
    if start > 0 and flat[start - 1] != " ":
        space = flat.find(" ", start, start + 60)
        start = space + 1 if space >= 0 else start
    text = flat[start : start + length]
    if start + length < len(flat) and flat[start + length] != " ":
        text = text.rpartition(" ")[0] or text
    return text.strip()


def _read_numbers_only(flat: str, found: re.Match[str]) -> Message:
    """Read the accounts of a message whose head was cut, or is Intel's limit of one block."""
    body = flat[found.start() : found.start() + _LONGEST_MESSAGE]
    sizes = {name: _first_size(body, expressions) for name, expressions in FIELDS.items()}
    index = DEVICE_INDEX.search(body)
    limited = found["block_limit"] is not None
    return Message(
        format_id="X4" if limited else "cut",
        kind=MessageKind.ALLOCATOR,
        backend=Backend.XPU if limited else _backend(found["device"]),
        requested=read_printed_size(found["tried"]),
        total=sizes["total"],
        allocated=sizes["allocated"],
        reserved=sizes["reserved"],
        unallocated=sizes["unallocated"],
        free=sizes["free"],
        process=sizes["process"],
        others=tuple(read_printed_size(m[1]) for m in OTHER_PROCESS.finditer(body)),
        allowed=sizes["allowed"],
        active=sizes["active"],
        device_index=int(index[1]) if index else None,
        text=excerpt(body, 0),
    )


def _read_allocator(flat: str, head: re.Match[str]) -> Message:
    following = HEAD.search(flat, head.end())
    end = min(following.start() if following else len(flat), head.start() + _LONGEST_MESSAGE)
    body = flat[head.start() : end]
    kind = MessageKind.ALLOCATOR
    if head["huge"]:
        kind = MessageKind.CORRUPT_SIZE
    elif head["rejected"]:
        kind = MessageKind.FRACTION
    elif head["workspace"]:
        kind = MessageKind.WORKSPACE
    backend = _backend(head["backend"])
    printed = head["tried"] or head["rejected"] or head["workspace"]
    sizes = {name: _first_size(body, expressions) for name, expressions in FIELDS.items()}
    index = DEVICE_INDEX.search(body)
    return Message(
        format_id=_format_id(kind, backend, flat[: head.start()], body),
        kind=kind,
        backend=backend,
        requested=read_printed_size(printed) if printed else None,
        total=sizes["total"],
        allocated=sizes["allocated"],
        reserved=sizes["reserved"],
        unallocated=sizes["unallocated"],
        free=sizes["free"],
        process=sizes["process"],
        others=tuple(read_printed_size(m[1]) for m in OTHER_PROCESS.finditer(body)),
        allowed=sizes["allowed"],
        private_pools=sizes["private_pools"],
        active=sizes["active"],
        device_index=int(index[1]) if index else None,
        text=excerpt(body, 0),
    )


def _first_size(body: str, expressions: tuple[re.Pattern[str], ...]) -> PrintedSize | None:
    found = next((m for e in expressions if (m := e.search(body))), None)
    return read_printed_size(found[1]) if found else None


def _backend(word: str | None) -> Backend:
    try:
        return Backend((word or "").lower())
    except ValueError:
        return Backend.UNKNOWN


def _format_id(kind: MessageKind, backend: Backend, before: str, body: str) -> str:
    if kind is MessageKind.CORRUPT_SIZE:
        return "F-1EB"
    if kind is MessageKind.FRACTION:
        return "F7"
    if kind is MessageKind.WORKSPACE:
        return "P3"
    if "total capacity;" in body:
        return _bracket_format(backend, body)
    return _sentence_format(backend, before, body)


def _bracket_format(backend: Backend, body: str) -> str:
    if backend is Backend.NPU:
        return "P2" if "PyTorch).If" in body else "P1"
    if backend is Backend.MLU:
        return "L1"
    if " cached)" in body:
        return "F00"
    if backend is Backend.HIP:
        return "R1"
    return "F1" if "max_split_size_mb" in body else "F0"


def _sentence_format(backend: Backend, before: str, body: str) -> str:
    if backend is Backend.MLU:
        return "L2"
    if backend is Backend.GCU:
        return "C1"
    if backend is Backend.XPU:
        return "X2" if "is free" in body else "X1"
    if backend is Backend.UNKNOWN:
        return "F-generic-fork"
    if backend is Backend.HIP:
        return _hip_sentence_format(body)
    if "capacty" in body:
        return "F2"
    if "PYTORCH_ALLOC_CONF" in body:
        return "F5"
    if "#optimizing-memory-usage" in body:
        return "F6"
    cut = "PYTORCH_CUDA_ALLOC_CONF" not in body
    if "private pools" in body or "torch.OutOfMemoryError" in before:
        return "F4|F5|F6" if cut else "F4"
    return "F3|F4|F5|F6" if cut else "F3|F4"


def _hip_sentence_format(body: str) -> str:
    if "capacty" in body:
        return "R2"
    if "PYTORCH_HIP_ALLOC_CONF" in body:
        return "R3"
    if "PYTORCH_CUDA_ALLOC_CONF" in body:
        return "R4"
    return "R5" if "PYTORCH_ALLOC_CONF" in body else "R3|R4|R5"


def _read_mps(found: re.Match[str]) -> Message:
    accounts = found["accounts"]
    other = _first_size(accounts, (MPS_OTHER,))
    return Message(
        format_id="M0" if "currently allocated" in accounts else "M1",
        kind=MessageKind.ALLOCATOR,
        backend=Backend.MPS,
        requested=read_printed_size(found["tried"]),
        allocated=_first_size(accounts, (MPS_ALLOCATED,)),
        others=(other,) if other else (),
        allowed=_first_size(accounts, (MPS_ALLOWED,)),
        text=excerpt(found[0], 0),
    )


def _read_prose(flat: str) -> Message | None:
    """Parse a person's sentence: "HIP out of memory, 59.36 GB allocated, 932 MB requested"."""
    out = PROSE_OUT.search(flat)
    if out is None:
        return None
    nearby = flat[max(0, out.start() - 400) : out.end() + 600]
    requested = PROSE_REQUESTED.search(nearby)
    allocated = PROSE_ALLOCATED.search(nearby)
    if requested is None and allocated is None:
        return None
    return Message(
        format_id="prose",
        kind=MessageKind.PROSE,
        backend=_backend(out["backend"]),
        requested=read_printed_size(requested[1] or requested[2]) if requested else None,
        allocated=read_printed_size(allocated[1] or allocated[2]) if allocated else None,
        text=excerpt(nearby, 0),
    )


def _read_bare(flat: str) -> Message | None:
    """Parse a bare statement that a device ran out, without a number."""
    found = BARE_OUT.search(flat)
    if found is None:
        return None
    return Message(
        format_id="unquoted",
        kind=MessageKind.PROSE,
        backend=_backend(found["backend"]),
        text=excerpt(flat, found.start() - 60),
    )
