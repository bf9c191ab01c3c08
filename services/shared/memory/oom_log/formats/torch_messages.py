"""The messages of torch's device allocators, by the ids that the parser gives them.

`message_parser` reads them number by number, so they have no expression here.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.shared.memory.oom_log.formats.text_format import Origin, binary, reported, source

_CUDA = "c10/cuda/CUDACachingAllocator.cpp"
_HIP = "hipified c10/hip/HIPCachingAllocator.cpp"
_NPU = "csrc/core/npu/NPUCachingAllocator.cpp"


@dataclass(frozen=True)
class TorchMessage:
    """One form of an allocator's message; `S`, `T`, `A` and so on stand for printed sizes."""

    format_id: str
    wording: str
    origin: Origin


TORCH_MESSAGES: tuple[TorchMessage, ...] = (
    TorchMessage(
        "F00",
        "CUDA out of memory. Tried to allocate S (GPU 0; T total capacity; A already allocated; F free; C cached)",
        reported("PyTorch", _CUDA, "up to 1.3"),
    ),
    TorchMessage(
        "F0",
        "... F free; R reserved in total by PyTorch)",
        reported("PyTorch", _CUDA, "1.4 to 1.9"),
    ),
    TorchMessage(
        "F1",
        "... R reserved in total by PyTorch) If reserved memory is >> allocated memory try setting max_split_size_mb",
        binary("PyTorch", _CUDA, "1.13.1, 2.0.1"),
    ),
    TorchMessage(
        "F2",
        "Tried to allocate S. GPU 0 has a total capacty of T of which F is free. [Process N has X memory in use.] "
        "[Including non-PyTorch memory, this process has P memory in use.] Of the allocated memory A is allocated "
        "by PyTorch, and U is reserved by PyTorch but unallocated.",
        binary("PyTorch", _CUDA, "2.1.2"),
    ),
    TorchMessage(
        "F3",
        "as F2, with 'capacity'; advice expandable_segments:True",
        binary("PyTorch", _CUDA, "2.2.2, 2.3.1"),
    ),
    TorchMessage(
        "F4",
        "as F3, with '[with G allocated in private pools (e.g., CUDA Graphs), ]'",
        binary("PyTorch", _CUDA, "2.4.1 to 2.9.1"),
    ),
    TorchMessage(
        "F5", "as F4; the variable is PYTORCH_ALLOC_CONF", binary("PyTorch", _CUDA, "2.10.0")
    ),
    TorchMessage(
        "F6",
        "as F4; another address of the documentation",
        binary("PyTorch", _CUDA, "2.11.0 to 2.14.0"),
    ),
    TorchMessage(
        "F7",
        "Allocation was preemptively rejected because it would exceed per_process_memory_fraction limit. "
        "Requested size: S",
        binary("PyTorch", _CUDA, "2.12.0 to 2.14.0"),
    ),
    TorchMessage(
        "F-1EB",
        "Tried to allocate more than 1EB memory.",
        binary("PyTorch", _CUDA, "1.13.1 to 2.14.0"),
    ),
    TorchMessage(
        "F-generic-fork",
        "Out of memory. Tried to allocate S. GPU 0 has a total capacity ...",
        reported("forks of PyTorch", _CUDA, "2.x"),
    ),
    TorchMessage(
        "R1",
        "HIP out of memory. as F1, PYTORCH_HIP_ALLOC_CONF",
        reported("PyTorch, ROCm", _HIP, "1.10 to 2.0"),
    ),
    TorchMessage(
        "R2", "HIP out of memory. as F2, 'capacty'", reported("PyTorch, ROCm and DTK", _HIP, "2.1")
    ),
    TorchMessage("R3", "HIP out of memory. as F4", reported("PyTorch, ROCm", _HIP, "2.4 to 2.8")),
    TorchMessage(
        "R4",
        "HIP out of memory. as F4; the variable is PYTORCH_CUDA_ALLOC_CONF",
        reported("PyTorch, ROCm", _HIP, "2.9, 2.10 development"),
    ),
    TorchMessage(
        "R5",
        "HIP out of memory. as F5",
        reported("PyTorch, ROCm", _HIP, "2.10 and later"),
    ),
    TorchMessage(
        "P1",
        "NPU out of memory. Tried to allocate S (NPU 0; T total capacity; A already allocated; C current active; "
        "F free; R reserved in total by PyTorch) If reserved memory is >> allocated memory ...",
        reported("torch_npu", _NPU, "up to 2.6"),
    ),
    TorchMessage(
        "P2",
        "as P1, 'by PyTorch).If reserved memory'",
        source("torch_npu", _NPU, "master, 2026-08"),
    ),
    TorchMessage(
        "P3",
        "NPU out of memory. NPUWorkspaceAllocator tried to allocate S(NPU 0; T total capacity; F free)",
        source("torch_npu", "csrc/core/npu/NPUWorkspaceAllocator.cpp", "master, 2026-08"),
    ),
    TorchMessage(
        "X1",
        "XPU out of memory. Tried to allocate S. GPU 0 has a total capacity of T. Of the allocated memory ...",
        reported("PyTorch", "c10/xpu/XPUCachingAllocator.cpp", "2.4 to 2.6"),
    ),
    TorchMessage(
        "X2",
        "as X1, with 'of which F is free'",
        reported("PyTorch", "c10/xpu/XPUCachingAllocator.cpp", "2.7 and later"),
    ),
    TorchMessage(
        "X4",
        "Current platform can NOT allocate memory block with size larger than 4GB! Tried to allocate S (GPU  0; ...",
        source(
            "intel-extension-for-pytorch",
            "csrc/gpu/runtime/CachingDeviceAllocator.cpp",
            "xpu 2.0.110 to 2.6.10",
        ),
    ),
    TorchMessage(
        "M0",
        "MPS backend out of memory (currently allocated: A, max allowed: L). Tried to allocate S on private pool.",
        reported("PyTorch", "aten/src/ATen/mps/MPSAllocator.mm", "1.12, 1.13"),
    ),
    TorchMessage(
        "M1",
        "MPS backend out of memory (MPS allocated: A, other allocations: O, max allowed: L). Tried to allocate S "
        "on private pool.",
        reported("PyTorch", "aten/src/ATen/mps/MPSAllocator.mm", "2.0 and later"),
    ),
    TorchMessage(
        "L1",
        "MLU out of memory. Tried to allocate S (MLU 0; ...",
        reported("torch_mlu", "caching allocator", "1.x"),
    ),
    TorchMessage(
        "L2",
        "MLU out of memory. Tried to allocate S. MLU 0 has a total capacity of T of which Fis free.",
        reported("torch_mlu", "caching allocator", "2.x"),
    ),
    TorchMessage(
        "C1",
        "GCU out of memory. Tried to allocate S. GCU 0 has a total capacity of T ...",
        reported("torch_gcu", "caching allocator", "2.x"),
    ),
    TorchMessage(
        "cut",
        "Tried to allocate S (GPU 0; ... without the words 'out of memory'",
        reported("excerpts", "-", "all"),
    ),
)
