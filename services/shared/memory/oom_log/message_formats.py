"""Catalogue of the out-of-memory texts of torch 1.x to 2.14 and of what surrounds it.

Source: the strings of the released libraries of torch 1.13.1 to 2.14.0, the allocators of
torch_npu, torch_mlu, torch_gcu and MPS, NCCL, DeepSpeed and kernel texts, and public reports.
All quantifiers are bounded, so that no text makes an expression backtrack without end.
"""

import re
from enum import Enum


class Backend(str, Enum):
    """The device kind whose memory ran out, by the first word of the message."""

    CUDA = "cuda"
    HIP = "hip"
    NPU = "npu"
    XPU = "xpu"
    MPS = "mps"
    MLU = "mlu"
    GCU = "gcu"
    HPU = "hpu"
    HOST = "host"
    UNKNOWN = "unknown"

    __str__ = str.__str__


class MessageKind(str, Enum):
    """The component that printed the message."""

    ALLOCATOR = "allocator"  # torch's caching allocator, with its accounts
    FRACTION = "fraction"  # rejected beforehand by per_process_memory_fraction
    CORRUPT_SIZE = "corrupt_size"  # "more than 1EB": nearly always a secondary error
    WORKSPACE = "workspace"  # an operator's scratch, not a tensor
    DRIVER = "driver"  # refused by the driver; no accounts
    MASKED = "masked"  # an NVML assertion raised while an OOM was being reported
    COLLECTIVE = "collective"  # NCCL, RCCL, HCCL buffers or a library handle
    HOST_ALLOCATOR = "host_allocator"  # a host allocation was refused; torch prints exact bytes
    PINNED_HOST = "pinned_host"  # locked host memory, though the text says CUDA
    KILLED = "killed"  # SIGKILL, cgroup, Slurm, Ray
    SHARED_MEMORY = "shared_memory"  # /dev/shm, as containers limit it
    ON_CHIP = "on_chip"  # shared memory or registers of one multiprocessor
    SERVING = "serving"  # an inference server's check of its memory at start-up
    TIME_LIMIT = "time_limit"  # the scheduler ended the job for its run time
    PROSE = "prose"  # a person's sentence with the numbers

    __str__ = str.__str__


SIZE = r"[0-9]{1,15}(?:\.[0-9]{1,6})?\s?(?:bytes|[KMGT]iB|[KMGT]B)"
DEVICES = r"CUDA|HIP|NPU|XPU|MLU|GCU|GPU|HPU|MUSA|SDAA"

HEAD = re.compile(
    rf"(?:(?P<backend>{DEVICES}) out of memory|\bOut of memory)\.\s+"
    rf"(?:Tried to allocate (?P<tried>{SIZE})"
    rf"|Allocation was preemptively rejected because it would exceed\s+"
    rf"per_process_memory_fraction limit\.\s+Requested size: (?P<rejected>{SIZE})"
    rf"|(?P<huge>Tried to allocate more than 1EB memory)"
    rf"|NPUWorkspaceAllocator tried to allocate (?P<workspace>{SIZE}))",
    re.ASCII,
)
# The same accounts without the words "out of memory": a cut head, and Intel's limit of one block.
NUMBERS_ONLY = re.compile(
    rf"(?P<block_limit>can NOT allocate memory block with size larger than .{{1,9}}! )?"
    rf"Tried to allocate (?P<tried>{SIZE})\.?\s?\(?(?P<device>{DEVICES})\s{{1,4}}[0-9]{{1,4}}"
    r"(?:;| has a total)",
    re.ASCII,
)
DEVICE_INDEX = re.compile(rf"(?:{DEVICES})\s{{1,4}}([0-9]{{1,4}})(?:;| has a total)", re.ASCII)
OTHER_PROCESS = re.compile(rf"Process [0-9]{{1,12}} has ({SIZE}) memory in use", re.ASCII)


def _size_between(before: str, after: str = "") -> re.Pattern[str]:
    return re.compile(rf"{before}({SIZE}){after}", re.ASCII)


# Field of a message -> the ways it is printed: bracket form up to 2.0, sentence form from 2.1.
FIELDS: dict[str, tuple[re.Pattern[str], ...]] = {
    "total": (
        _size_between("", " total capacity"),
        _size_between("has a total capac(?:i)?ty of "),
    ),
    "allocated": (
        _size_between("", " already allocated"),
        _size_between("Of the allocated memory ", " is allocated"),
    ),
    "active": (_size_between("", " current active"),),
    "free": (_size_between("", " free[;)]"), _size_between("of which ", " ?is free")),
    "allowed": (_size_between("", " allowed;"),),
    "reserved": (_size_between("", " reserved in total"), _size_between("", " cached")),
    "unallocated": (_size_between("", " is reserved by PyTorch but unallocated"),),
    "private_pools": (_size_between("with ", " allocated in private pools"),),
    "process": (_size_between("this process has ", " memory in use"),),
}

MPS_HEAD = re.compile(
    rf"MPS backend out of memory \((?P<accounts>[^)]{{0,200}})\)\.\s+"
    rf"Tried to allocate (?P<tried>{SIZE}) on (?:private|shared) pool",
    re.ASCII,
)
MPS_ALLOCATED = _size_between(r"(?:MPS allocated|currently allocated): ")
MPS_OTHER = _size_between("other allocations: ")
MPS_ALLOWED = _size_between("max allowed: ")

PROSE_OUT = re.compile(
    r"\b(?:(?P<backend>CUDA|HIP|NPU|XPU|MPS) )?(?:out[- ]of[- ]memory|OOM)\b",
    re.ASCII | re.IGNORECASE,
)
# The head of a message whose numbers were not quoted.
BARE_OUT = re.compile(rf"\b(?P<backend>{DEVICES}|MPS) out of memory|\bOutOfMemoryError\b", re.ASCII)
PROSE_ALLOCATED = re.compile(
    rf"({SIZE})\s+(?:(?:is|was|were|had been|already)\s+){{0,3}}(?:allocated|in use)\b"
    rf"|\ballocated[:=]?\s+(?:about |~)?({SIZE})",
    re.ASCII | re.IGNORECASE,
)
PROSE_REQUESTED = re.compile(
    rf"({SIZE})\s+(?:(?:more|was|were|is|are|being)\s+){{0,3}}(?:requested|needed|wanted)\b"
    rf"|(?:tr(?:ied|ying) to allocate|\brequest(?:ed|ing|s)?|\basked for)[:=]?\s+(?:of )?"
    rf"(?:another |a further |about |~)?({SIZE})",
    re.ASCII | re.IGNORECASE,
)
