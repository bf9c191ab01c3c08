"""Texts of host memory: refused allocations, pinned memory, shared memory, on-chip memory."""

from __future__ import annotations

from services.shared.memory.oom_log.formats.text_format import (
    BYTES,
    binary,
    documented,
    reported,
    source,
    text_format,
)
from services.shared.memory.oom_log.message_formats import Backend, MessageKind

HOST_REFUSALS = (
    text_format(
        "H3",
        MessageKind.HOST_ALLOCATOR,
        Backend.HOST,
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): "
        rf"you tried to allocate {BYTES} bytes",
        examples=(
            "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate "
            "memory: you tried to allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
            "DefaultCPUAllocator: not enough memory: you tried to allocate 234881024 bytes.",
        ),
        origins=(
            binary("PyTorch", "c10/core/impl/alloc_cpu.cpp", "2.13.0"),
            reported("PyTorch on Windows", "c10/core/impl/alloc_cpu.cpp", "1.x, 2.x"),
        ),
        triggers=("DefaultCPUAllocator",),
    ),
    text_format(
        "H7",
        MessageKind.HOST_ALLOCATOR,
        Backend.HOST,
        r"Unable to allocate (?P<size>[0-9]{1,9}(?:\.[0-9]{0,3})? (?:bytes|[KMGTPE]iB)) for an array"
        rf"|ArrowMemoryError: (?:re)?alloc of size {BYTES} failed"
        r"|ArrowMemoryError: malloc of size (?P<wanted>[0-9]{1,18}) failed",
        examples=(
            "Unable to allocate 550. GiB for an array with shape (1,) and data type |S2",
            "pyarrow.lib.ArrowMemoryError: malloc of size 4294967296 failed",
            "pyarrow.lib.ArrowMemoryError: realloc of size 8589934592 failed",
        ),
        origins=(
            source("NumPy", "numpy/_core/_exceptions.py", "2.3.3"),
            reported("Arrow", "cpp/src/arrow/memory_pool.cc", "0.15 to 24"),
        ),
        triggers=("Unable to allocate", "ArrowMemoryError"),
    ),
    text_format(
        "H8",
        MessageKind.HOST_ALLOCATOR,
        Backend.HOST,
        r"paging file is too small|\bos error 1455\b|\bWinError 1455\b|\bWinError 8\b",
        examples=(
            "OSError: [WinError 1455] The paging file is too small for this operation to complete",
        ),
        origins=(documented("Windows", "system error codes 8 and 1455", "all"),),
        triggers=("paging file", "1455", "WinError 8"),
    ),
)
HOST_ERRORS = (
    text_format(
        "H4",
        MessageKind.HOST_ALLOCATOR,
        Backend.HOST,
        r"Cannot allocate memory|(?<![\w.])MemoryError\b|std::bad_alloc"
        r"|memory allocation of [0-9]{1,18} bytes failed|\$ Torch: not enough memory",
        examples=(
            "OSError: [Errno 12] Cannot allocate memory",
            "terminate called after throwing an instance of 'std::bad_alloc'",
            "memory allocation of 4294967296 bytes failed",
        ),
        origins=(
            documented("Linux", "errno 12 (ENOMEM)", "all"),
            documented("Python and C++", "MemoryError, std::bad_alloc", "all"),
            reported("Rust", "library/alloc/src/alloc.rs", "1.x"),
        ),
        triggers=(
            "MemoryError",
            "bad_alloc",
            "allocate memory",
            "memory allocation of",
            "Torch: not enough",
        ),
    ),
)
ON_CHIP = (
    text_format(
        "T1",
        MessageKind.ON_CHIP,
        Backend.UNKNOWN,
        r"out of resources?: (?:shared memory|tensor memory|threads|registers)"
        r"|out of resource: \S{1,160} Required: [0-9]{1,12}"
        r"|\bOutOfResources\b|uses too much shared data|[Ll]ocal memory (?:\([0-9]{1,9}\) exceeds limit"
        r"|limit exceeded)|too many resources requested for launch"
        r"|Register allocation failed with register count|memory space (?:vmem|smem|sflag)\b",
        examples=(
            "out of resource: shared memory, Required: 663808, Hardware limit: 101376. Reducing "
            "block sizes or `num_stages` may help.",
            "ptxas error   : Entry function 'kernel' uses too much shared data (0x1c000 bytes)",
            "No valid triton configs. OutOfMemoryError: out of resource: triton_red_fused Required: "
            "131072 Hardware limit:101376 Reducing block sizes or `num_stages` may help.",
            "error: local memory (67584) exceeds limit (65536) in function 'kernel'",
            "RuntimeError: CUDA error: too many resources requested for launch",
            "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem while allocating on stack",
        ),
        origins=(
            source("Triton", "triton/runtime/errors.py, compiler/compiler.py", "3.4.0"),
            reported("ptxas", "-", "11, 12"),
            reported("Inductor", "torch/_inductor/runtime/triton_heuristics.py", "2.4 to 2.14"),
            reported("LLVM for AMD GPUs", "local memory of a work group", "ROCm 5 to 7"),
            reported("XLA on TPU", "vector and scalar memory of a core", "2023 to 2026"),
            documented("CUDA runtime", "cudaErrorLaunchOutOfResources", "all"),
        ),
        triggers=(
            "out of resource",
            "OutOfResources",
            "too much shared",
            "ocal memory",
            "many resources requested",
            "Register allocation",
            "memory space",
        ),
    ),
)
PINNED = (
    text_format(
        "F-pinned",
        MessageKind.PINNED_HOST,
        Backend.HOST,
        r"cudaHostAlloc|hipHostMalloc|cudaHostRegister|CachingHostAllocator|cudaMallocHost"
        r"|\bpin_memory\b.{0,80}out of memory|Malloc pin memory failed"
        r"|mlock failed to allocate [0-9]{1,18} bytes|of pinned memory: out of memory"
        r"|[Cc]annot pin .{0,40}(?:out of memory|cudaErrorMemoryAllocation)",
        examples=(
            "mlock failed to allocate 4294967296 bytes with error no 12 msg Cannot allocate memory",
            "Malloc pin memory failed, host out of memory, Rried to allocate size: 1073741824",
            "RuntimeError: CUDA error: out of memory ... at::cuda::CachingHostAllocator",
            "ggml_cuda_host_malloc: failed to allocate 4096.00 MiB of pinned memory: out of memory",
        ),
        origins=(
            source("DeepSpeed", "csrc/pin_memory/page_alloc.cpp", "0.19.6"),
            source("torch_npu", "csrc/core/npu/CachingHostAllocator.cpp", "master, 2026-08"),
            source("llama.cpp", "ggml/src/ggml-cuda/ggml-cuda.cu", "master, 2026"),
            reported("CUDA and HIP", "names of the driver's functions", "all"),
        ),
        triggers=(
            "pinned memory",
            "annot pin",
            "HostAlloc",
            "hipHostMalloc",
            "cudaHostRegister",
            "cudaMallocHost",
            "pin_memory",
            "pin memory",
            "mlock",
        ),
    ),
)
SHARED_MEMORY = (
    text_format(
        "S1",
        MessageKind.SHARED_MEMORY,
        Backend.HOST,
        r"Signal 7 \(SIGBUS\)|exitcode\s{0,4}:\s{0,4}-7\b|\bSIGBUS\b|killed by signal: Bus error"
        r"|[Bb]us error\s{1,20}(?:\(core dumped\)|\S{0,40}python)|Fatal Python error: Bus error"
        r"|ObjectStoreFullError|insufficient shared memory|out of shared memory"
        r"|unable to (?:open|write to|allocate|resize|mmap) (?:[\w ]{0,20})?shared memory"
        r"|Couldn't allocate shared memory segment"
        r"|/dev/shm.{0,80}(?:No space left|too small|full)|No space left on device.{0,120}/dev/shm"
        r"|failed to (?:extend|create shared memory file) /dev/shm.{0,120}"
        r"|Error while (?:creating|attaching to) shared memory segment",
        examples=(
            "DataLoader worker (pid 325) is killed by signal: Bus error. It is possible that "
            "dataloader's workers are out of shared memory. Please try to raise your shared memory "
            "limit.",
            "ERROR: Unexpected bus error encountered in worker. This might be caused by "
            "insufficient shared memory (shm).",
            "unable to allocate shared memory(shm) for file </torch_7_1>: No space left on device",
            "NCCL WARN Error: failed to extend /dev/shm/nccl-Ab12cd to 33030532 bytes, error: No "
            "space left on device (28)",
            "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-Ab12cd (size "
            "33030528), error: No space left on device (28)",
            "exitcode  : -7 (pid: 54) traceback : Signal 7 (SIGBUS) received by PID 54",
            "ray.exceptions.ObjectStoreFullError: Failed to put object in object store because it "
            "is full",
            "[1]    12345 bus error  python train.py",
        ),
        origins=(
            binary(
                "PyTorch", "torch/csrc/DataLoader.cpp, aten/src/ATen/MapAllocator.cpp", "2.13.0"
            ),
            source("NCCL", "src/os/linux.cc", "master, 2026-06"),
            reported("Ray", "ray/exceptions.py", "1.x, 2.x"),
            reported("shells", "signal names", "all"),
        ),
        triggers=("SIGBUS", "-7", "us error", "shared memory", "/dev/shm", "ObjectStoreFull"),
    ),
)
