"""Texts of memory failures that are no message of torch's device allocator, as a table.

Each entry names what prints it and where that was read: a project's source, or public reports of
it. The first entry that matches wins, so a specific text precedes the general one.
All quantifiers are bounded, so that no text makes an expression backtrack without end.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.shared.memory.oom_log.message_formats import SIZE, Backend, MessageKind

_BYTES = r"(?P<tried>[0-9]{1,18})\b"
_GIB = r"[0-9]{1,9}(?:\.[0-9]{1,6})?"


@dataclass(frozen=True)
class TextFormat:
    """One text: what prints it, what it says, and the words of it that a scan looks for.

    Named groups of `expression`: `tried` is a request in bytes; `size`, `free` and `total` are
    printed sizes; `free_gib`, `total_gib` and `wanted_gib` are numbers of gibibytes; `resident_kib`
    is what a killed process held, in kibibytes.
    """

    format_id: str
    kind: MessageKind
    backend: Backend
    expression: re.Pattern[str]
    source: str
    triggers: tuple[str, ...]


def _format(
    format_id: str,
    kind: MessageKind,
    backend: Backend,
    expression: str,
    source: str,
    *triggers: str,
) -> TextFormat:
    compiled = re.compile(expression, re.ASCII)
    return TextFormat(format_id, kind, backend, compiled, source, triggers)


_HOST_REFUSALS = (
    _format(
        "H3",
        MessageKind.HOST_ALLOCATOR,
        Backend.HOST,
        r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory): "
        rf"you tried to allocate {_BYTES} bytes",
        "pytorch, c10/core/impl/alloc_cpu.cpp, 1.13 to 2.14",
        "DefaultCPUAllocator",
    ),
    _format(
        "H7",
        MessageKind.HOST_ALLOCATOR,
        Backend.HOST,
        r"Unable to allocate (?P<size>[0-9]{1,9}(?:\.[0-9]{0,3})? (?:bytes|[KMGTPE]iB)) for an array",
        "numpy, numpy/_core/_exceptions.py (_ArrayMemoryError), 1.17 to 2.x",
        "Unable to allocate",
    ),
    _format(
        "H8",
        MessageKind.HOST_ALLOCATOR,
        Backend.HOST,
        r"paging file is too small|\bos error 1455\b|\bWinError 1455\b|\bWinError 8\b",
        "Windows, ERROR_COMMITMENT_LIMIT (1455) and ERROR_NOT_ENOUGH_MEMORY (8)",
        "paging file",
        "1455",
        "WinError 8",
    ),
)
_ON_CHIP = (
    _format(
        "T1",
        MessageKind.ON_CHIP,
        Backend.UNKNOWN,
        r"out of resources?: (?:shared memory|registers|threads|tensor memory)"
        r"|\bOutOfResources\b|uses too much shared data|too much shared memory",
        "triton, python/triton/runtime/errors.py (OutOfResources), 2.0 to 3.x; ptxas",
        "out of resource",
        "OutOfResources",
        "too much shared",
    ),
)
_SHARED_MEMORY = (
    _format(
        "S1",
        MessageKind.SHARED_MEMORY,
        Backend.HOST,
        r"Signal 7 \(SIGBUS\)|exitcode\s{0,4}:\s{0,4}-7\b|\bSIGBUS\b|killed by signal: Bus error"
        r"|Bus error \(core dumped\)|insufficient shared memory|out of shared memory"
        r"|unable to (?:open|write to|allocate|resize|mmap) (?:[\w ]{0,20})?shared memory"
        r"|/dev/shm.{0,80}(?:No space left|too small|full)|No space left on device.{0,120}/dev/shm"
        r"|(?:creating|extending|truncating) shared memory segment /dev/shm.{0,120}",
        "pytorch, torch/utils/data/_utils/signal_handling.py; torchrun's summary; NCCL "
        "src/misc/shmutils.cc 2.10 to 2.27; containers",
        "SIGBUS",
        "-7",
        "Bus error",
        "shared memory",
        "/dev/shm",
    ),
)
_SERVING = (
    _format(
        "V1",
        MessageKind.SERVING,
        Backend.UNKNOWN,
        rf"Free memory on device.{{0,20}} \((?P<free_gib>{_GIB})/(?P<total_gib>{_GIB}) GiB\)"
        r" on startup is less than desired GPU memory utilization \([0-9.]{1,6},\s{1,3}"
        rf"(?P<wanted_gib>{_GIB}) GiB\)",
        "vLLM, vllm/v1/worker/gpu_worker.py and worker/utils.py, 0.8 to 0.11",
        "less than desired",
    ),
    _format(
        "V2",
        MessageKind.SERVING,
        Backend.UNKNOWN,
        r"No available memory for the cache blocks"
        r"|larger than the maximum number of tokens that can be stored in (?:the )?KV cache"
        r"|To serve at least one request with the model'?s'? max seq len"
        r"|Not enough memory[.,] Please try (?:to increase|increasing) --mem-fraction-static"
        r"|CUDA out of memory occurred when (?:warming up|profiling)"
        r"|larger than the available KV cache memory|Not enough memory to handle [0-9]{1,9} prefill",
        "vLLM, vllm/v1/core/kv_cache_utils.py and worker, 0.2 to 0.11; SGLang, "
        "python/sglang/srt/model_executor/model_runner.py; text-generation-inference, flash_causal_lm.py",
        "cache blocks",
        "KV cache",
        "max seq len",
        "mem-fraction-static",
        "occurred when",
        "Not enough memory",
    ),
)
_DEVICE_TEXTS = (
    _format(
        "G1",
        MessageKind.ALLOCATOR,
        Backend.HPU,
        rf"MODULE:PT_DEVMEM Allocation failed for size::{_BYTES}",
        "Gaudi, PyTorch bridge, public reports",
        "PT_DEVMEM",
    ),
    _format(
        "J1",
        MessageKind.PROSE,
        Backend.UNKNOWN,
        rf"RESOURCE_EXHAUSTED:.{{0,120}}allocat(?:e|ing) (?P<tried>[0-9]{{1,18}})(?= ?bytes)"
        rf"|RESOURCE_EXHAUSTED:.{{0,120}}(?:allocat\w{{1,4}}|request for) (?P<size>{SIZE})"
        r"|RESOURCE_EXHAUSTED:.{0,40}(?:[Oo]ut of memory|OOM|Failed to allocate)"
        r"|OOM when allocating tensor with shape",
        "XLA, xla/tsl/framework/bfc_allocator.cc and xla/pjrt; TensorFlow, core/framework",
        "RESOURCE_EXHAUSTED",
        "OOM when",
    ),
    _format(
        "F-pinned",
        MessageKind.PINNED_HOST,
        Backend.HOST,
        r"cudaHostAlloc|hipHostMalloc|cudaHostRegister|CachingHostAllocator|cudaMallocHost"
        r"|\bpin_memory\b.{0,80}out of memory|[Ff]ailed to (?:pin|allocate pinned) (?:host )?memory",
        "pytorch, aten/src/ATen/cuda/CachingHostAllocator.cpp, 1.13 to 2.14; DeepSpeed, csrc/aio",
        "HostAlloc",
        "hipHostMalloc",
        "cudaHostRegister",
        "cudaMallocHost",
        "pin_memory",
        "pinned",
    ),
    _format(
        "F-nvml",
        MessageKind.MASKED,
        Backend.CUDA,
        r"INTERNAL ASSERT FAILED at .{0,200}CUDACachingAllocator\.cpp",
        "pytorch, c10/cuda/CUDACachingAllocator.cpp, 2.1 to 2.13",
        "CUDACachingAllocator.cpp",
    ),
    _format(
        "N2",
        MessageKind.COLLECTIVE,
        Backend.UNKNOWN,
        rf"Failed to (?:CUDA|HIP|Cuda|Hip) (?:host )?[mc]alloc\w{{0,8}} {_BYTES} bytes",
        "NCCL and RCCL, src/include/alloc.h, 2.10 to 2.27",
        "calloc",
        "Failed to CUDA",
        "Failed to HIP",
    ),
    _format(
        "N1",
        MessageKind.COLLECTIVE,
        Backend.UNKNOWN,
        r"(?:NCCL|RCCL|HCCL) WARN .{0,40}out of memory"
        r"|(?:Cuda|HIP|Hip) failure (?:[0-9]{1,4} )?'out of memory'"
        r"|(?:nccl|hccl|HCCL)\w{1,40}.{0,120}(?:out of memory|memory alloc\w{0,8} (?:fail|error))"
        r"|CU\w{0,6}_STATUS_ALLOC_FAILED|HIP\w{0,6}_STATUS_ALLOC_FAILED"
        r"|rocblas_status_memory_error|miopenStatusAllocFailed",
        "NCCL, src/include/checks.h, 2.10 to 2.27; HCCL; cuBLAS, cuDNN, rocBLAS, MIOpen status names",
        "failure",
        "_STATUS_ALLOC_FAILED",
        "rocblas_status_memory",
        "miopenStatusAlloc",
        "ccl",
    ),
    _format(
        "B1",
        MessageKind.DRIVER,
        Backend.CUDA,
        r"Error (?:out of memory|invalid argument) at line [0-9]{1,6} in file"
        r" .{0,80}(?:pythonInterface|ops\.cu)",
        "bitsandbytes, csrc/pythonInterface.c and csrc/ops.cu, 0.37 to 0.45",
        "Error out of memory",
        "pythonInterface",
    ),
    _format(
        "X5",
        MessageKind.DRIVER,
        Backend.XPU,
        r"Allocation is out of device memory on current platform",
        "intel-extension-for-pytorch, csrc/gpu/runtime/CachingDeviceAllocator.cpp, 1.13 to 2.3",
        "out of device memory",
    ),
    _format(
        "X3",
        MessageKind.DRIVER,
        Backend.XPU,
        r"(?:UR|ZE|PI)_(?:RESULT_)?ERROR_OUT_OF_(?:RESOURCES|DEVICE_MEMORY|HOST_MEMORY)",
        "oneAPI, Level Zero and unified runtime headers",
        "_ERROR_OUT_OF_",
    ),
    _format(
        "P4",
        MessageKind.DRIVER,
        Backend.NPU,
        r"\bERR00100\b|\bEL0004\b|\b207001\b|ACL_ERROR_RT_MEMORY_ALLOCATION"
        r"|(?:rtMalloc|aclrtMalloc\w{0,20}|drvMemAlloc|halMemAlloc)\b.{0,80}(?:fail|error)",
        "CANN, runtime error codes; torch_npu, NPUException.h, 2.0 to 2.7",
        "ERR00100",
        "EL0004",
        "207001",
        "MEMORY_ALLOCATION",
        "Malloc",
        "emAlloc",
    ),
    _format(
        "F-driver",
        MessageKind.DRIVER,
        Backend.CUDA,
        r"CUDA driver error: out of memory|\bCUDA_ERROR_OUT_OF_MEMORY\b",
        "pytorch, c10/cuda/driver_api.h, 2.1 to 2.14; CUDA driver API; cudarc (candle, TEI)",
        "CUDA_ERROR_OUT_OF",
    ),
    _format(
        "F-async",
        MessageKind.DRIVER,
        Backend.CUDA,
        r"would exceed allowed memory\. \(out of memory\)",
        "pytorch, c10/cuda/CUDAMallocAsyncAllocator.cpp, 2.0 to 2.14",
        "allowed memory",
    ),
    _format(
        "K1",
        MessageKind.DRIVER,
        Backend.CUDA,
        rf"allocating (?P<size>{SIZE}) on device [0-9]{{1,3}}: cudaMalloc failed"
        r"|cudaMalloc(?:Async)? failed:? out of memory",
        "llama.cpp, ggml/src/ggml-cuda/ggml-cuda.cu, b2000 to b6000",
        "cudaMalloc",
    ),
    _format(
        "F-bare",
        MessageKind.DRIVER,
        Backend.CUDA,
        r"CUDA error: out of memory|cudaErrorMemoryAllocation"
        r"|CUDA runtime error.{0,20}out of memory|CUDA error 2\b.{0,40}out of memory",
        "pytorch, c10/cuda/CUDAException.cpp, 1.x to 2.14",
        "cudaErrorMemoryAllocation",
    ),
    _format(
        "R-bare",
        MessageKind.DRIVER,
        Backend.HIP,
        r"HIP (?:driver )?error: out of memory|hipErrorOutOfMemory",
        "pytorch, hipified c10/hip/HIPException.cpp, 1.10 to 2.14",
        "hipErrorOutOfMemory",
    ),
)
_TIME_LIMIT = (
    _format(
        "L3",
        MessageKind.TIME_LIMIT,
        Backend.UNKNOWN,
        r"DUE TO TIME LIMIT|\bTIMEOUT\b.{0,40}slurm|PBS: job killed: walltime"
        r"|TERM_RUNLIMIT",
        "Slurm, src/slurmd/slurmstepd/req.c, 17 to 24; PBS; LSF",
        "TIME LIMIT",
        "walltime",
        "TERM_RUNLIMIT",
    ),
)
_KILLS = (
    _format(
        "H9",
        MessageKind.KILLED,
        Backend.HOST,
        r"[Oo]ut of memory: Kill(?:ed)? process [0-9]{1,9} .{0,300}?"
        r"anon-rss:(?P<resident_kib>[0-9]{1,15})kB",
        "Linux, mm/oom_kill.c, 2.6 to 6.x",
        "anon-rss",
        "ut of memory: Kill",
    ),
    _format(
        "H5",
        MessageKind.KILLED,
        Backend.HOST,
        r"[Tt]asks? w\w{2,3} killed due to the node running low on memory"
        r"|Workers? \(tasks / actors\) killed due to memory pressure"
        r"|ray\.exceptions\.OutOfMemoryError"
        r"|[0-9.]{1,12}GB / [0-9.]{1,12}GB \([0-9.]{1,8}%?\)",
        "Ray, src/ray/raylet/node_manager.cc and common/memory_monitor.cc, 2.0 to 2.40",
        "running low on memory",
        "memory pressure",
        "GB / ",
    ),
    _format(
        "H2",
        MessageKind.KILLED,
        Backend.HOST,
        r"DataLoader worker \(pid.{0,20}\) is killed by signal: Killed",
        "pytorch, torch/utils/data/_utils/signal_handling.py, 1.x to 2.14",
        "DataLoader worker",
    ),
    _format(
        "H4",
        MessageKind.HOST_ALLOCATOR,
        Backend.HOST,
        r"Cannot allocate memory|(?<![\w.])MemoryError\b|std::bad_alloc"
        r"|memory allocation of [0-9]{1,18} bytes failed",
        "Linux ENOMEM (errno 12); Python; C++; Rust, library/alloc/src/alloc.rs",
        "MemoryError",
        "bad_alloc",
        "allocate memory",
        "memory allocation of",
    ),
    _format(
        "H1",
        MessageKind.KILLED,
        Backend.HOST,
        r"exit ?(?:codes?|status)\s{0,4}[:=]?\s{0,4}(?:-9|137)\b|return ?code\s{0,4}[:=]?\s{0,4}-9\b"
        r"|(?<!via )(?<!via Signals\.)SIGKILL|\bsignal 9\b|OOMKilled|[Oo][Oo][Mm][ _-]?[Kk]ill"
        r"|[Oo]ut of memory: Kill|(?:^|[0-9:]\s{1,9})Killed\b"
        r"|[Ee]xceeded (?:job |step )?memory limit|low on resource: memory"
        r"|TERM_MEMLIMIT|cgroup out-of-memory handler",
        "torchrun, DeepSpeed launcher, shells, Linux, Kubernetes kubelet (OOMKilled, Evicted), "
        "Slurm src/slurmd, LSF",
        "Killed",
        "signal 9",
        "exit status",
        "returncode",
        "exitcode",
        "exit code",
        "return code",
        "SIGKILL",
        "memory limit",
        "resource: memory",
        "MEMLIMIT",
        "oom",
        "OOM",
    ),
    _format(
        "P5",
        MessageKind.DRIVER,
        Backend.UNKNOWN,
        r"Failed to allocate memory",
        "CANN and others: no component is named",
        "allocate memory",
    ),
)
OTHER_FORMATS: tuple[TextFormat, ...] = (
    *_HOST_REFUSALS,
    *_ON_CHIP,
    *_SHARED_MEMORY,
    *_SERVING,
    *_DEVICE_TEXTS,
    *_TIME_LIMIT,
    *_KILLS,
)
