"""Texts of devices below or beside torch's allocator: drivers, runtimes, collectives."""

from __future__ import annotations

from services.shared.memory.oom_log.formats.text_format import (
    BYTES,
    binary,
    documented,
    reported,
    source,
    text_format,
)
from services.shared.memory.oom_log.message_formats import SIZE, Backend, MessageKind

RUNTIMES = (
    text_format(
        "G1",
        MessageKind.ALLOCATOR,
        Backend.HPU,
        rf"MODULE:PT_DEVMEM Allocation failed for size::{BYTES}",
        examples=(
            "[Rank:7] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1073741824 "
            "(1024)MB",
        ),
        origins=(reported("Gaudi", "PyTorch bridge", "1.10 to 1.20"),),
        triggers=("PT_DEVMEM",),
    ),
    text_format(
        "J1",
        MessageKind.PROSE,
        Backend.UNKNOWN,
        rf"RESOURCE_EXHAUSTED:.{{0,120}}allocat(?:e|ing) (?P<tried>[0-9]{{1,18}})(?= ?bytes)"
        rf"|RESOURCE_EXHAUSTED:.{{0,120}}(?:allocat\w{{1,4}}|request for) (?P<size>{SIZE})"
        r"|RESOURCE_EXHAUSTED:.{0,40}(?:[Oo]ut of memory|OOM|Failed to allocate)"
        r"|OOM when allocating tensor with shape",
        examples=(
            "RESOURCE_EXHAUSTED: Out of memory allocating 3623878656 bytes.",
            "XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate "
            "3623878656 bytes.",
            "RESOURCE_EXHAUSTED: Failed to allocate request for 1.13GiB (1216348160B) on device",
            "ResourceExhaustedError: OOM when allocating tensor with shape[32,512,768]",
        ),
        origins=(
            binary("jaxlib", "libjax_common.so", "0.7.2"),
            reported("XLA", "bfc_allocator.cc", "jaxlib 0.3 to 0.6"),
            reported("TensorFlow", "core/framework/op_kernel.cc", "1.x, 2.x"),
        ),
        triggers=("RESOURCE_EXHAUSTED", "OOM when"),
    ),
)
DRIVERS = (
    text_format(
        "F-nvml",
        MessageKind.MASKED,
        Backend.CUDA,
        r"INTERNAL ASSERT FAILED at .{0,200}CUDACachingAllocator\.cpp",
        examples=(
            'RuntimeError: NVML_SUCCESS == r INTERNAL ASSERT FAILED at "../c10/cuda/'
            'CUDACachingAllocator.cpp":838, please report a bug to PyTorch.',
        ),
        origins=(binary("PyTorch", "c10/cuda/CUDACachingAllocator.cpp", "2.1.2 to 2.13.0"),),
        triggers=("CUDACachingAllocator.cpp",),
    ),
    text_format(
        "N2",
        MessageKind.COLLECTIVE,
        Backend.UNKNOWN,
        rf"Failed to (?:CUDA|HIP) (?:host alloc|[mc]alloc(?: async)?) {BYTES} bytes",
        examples=(
            "NCCL WARN Failed to CUDA calloc 10485760 bytes",
            "NCCL WARN Failed to CUDA host alloc 147456 bytes",
            "RCCL WARN Failed to HIP malloc 4194304 bytes",
        ),
        origins=(
            source("NCCL", "src/include/alloc.h", "master, 2026-06"),
            reported("RCCL", "src/include/alloc.h", "ROCm 5, 6"),
        ),
        triggers=("Failed to CUDA", "Failed to HIP"),
    ),
    text_format(
        "N1",
        MessageKind.COLLECTIVE,
        Backend.UNKNOWN,
        r"(?:NCCL|RCCL|HCCL) WARN .{0,40}out of memory"
        r"|(?:Cuda|HIP|Hip) failure (?:[0-9]{1,4} )?'out of memory'"
        r"|(?:nccl|hccl|HCCL)\w{1,40}.{0,120}(?:out of memory|memory alloc\w{0,8} (?:fail|error))"
        r"|HCCL_E_OOM"
        r"|CU\w{0,6}_STATUS_ALLOC_FAILED|HIP\w{0,6}_STATUS_ALLOC_FAILED"
        r"|rocblas_status_memory_error|miopenStatusAllocFailed",
        examples=(
            "NCCL WARN Cuda failure 2 'out of memory'",
            "NCCL WARN Cuda failure 'out of memory'",
            "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        ),
        origins=(
            source("NCCL", "src/include/checks.h, src/include/cudawrap.h", "master, 2026-06"),
            source("HCCL", "hccl_types.h (HCCL_E_OOM)", "torch_npu master, 2026-08"),
            documented("cuBLAS, cuDNN, rocBLAS, MIOpen", "status names", "all"),
        ),
        triggers=(
            "failure",
            "HCCL_E_OOM",
            "_STATUS_ALLOC_FAILED",
            "rocblas_status_memory",
            "miopenStatusAlloc",
            "ccl",
        ),
    ),
    text_format(
        "B1",
        MessageKind.DRIVER,
        Backend.CUDA,
        r"Error (?:out of memory|invalid argument) at line [0-9]{1,6} in file"
        r" .{0,80}(?:pythonInterface|ops\.cu|compat\.cuh)",
        examples=(
            "Error out of memory at line 380 in file /project/csrc/pythonInterface.c",
            "Error invalid argument at line 396 in file /project/csrc/pythonInterface.c",
        ),
        origins=(
            binary("bitsandbytes", "libbitsandbytes_cuda118.so", "0.41.0"),
            source("bitsandbytes", "csrc/compat.cuh", "0.50.2.dev0"),
        ),
        triggers=("Error out of memory", "pythonInterface", "in file"),
    ),
    text_format(
        "X5",
        MessageKind.DRIVER,
        Backend.XPU,
        r"Allocation is out of device memory on current platform",
        examples=("RuntimeError: Allocation is out of device memory on current platform.",),
        origins=(
            source(
                "intel-extension-for-pytorch", "csrc/gpu/utils/DPCPP.h", "xpu 2.0.110 to 2.7.10"
            ),
        ),
        triggers=("out of device memory",),
    ),
    text_format(
        "X3",
        MessageKind.DRIVER,
        Backend.XPU,
        r"(?:UR|ZE|PI)_(?:RESULT_)?ERROR_OUT_OF_(?:RESOURCES|DEVICE_MEMORY|HOST_MEMORY)",
        examples=(
            "RuntimeError: level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)",
            "Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)",
        ),
        origins=(
            source(
                "intel-extension-for-pytorch", "csrc/gpu/utils/DPCPP.h", "xpu 2.0.110 to 2.8.10"
            ),
            documented("oneAPI", "Level Zero and unified runtime result codes", "all"),
        ),
        triggers=("_ERROR_OUT_OF_",),
    ),
    text_format(
        "P4",
        MessageKind.DRIVER,
        Backend.NPU,
        # ERR00100 alone is any failed call of the ACL, so it is no entry of its own.
        r"\bEL0004\b|(?<![0-9])207001(?![0-9])|ACL_ERROR_RT_MEMORY_ALLOCATION"
        r"|Failed to apply for memory|\[Malloc\]\[Memory\].{0,80}fail"
        r"|(?:rtMalloc|aclrtMalloc\w{0,20}|drvMemAlloc|halMemAlloc)\b.{0,80}(?:fail|error)",
        examples=(
            "[ERROR] ERR00100 PTA call acl api failed. EL0004: Failed to allocate memory.",
            "[Error]: Failed to apply for memory. Check the remaining storage space in the hardware "
            "environment.",
        ),
        origins=(
            source("torch_npu", "csrc/core/npu/NPUException.cpp", "master, 2026-08"),
            source("torch_npu", "csrc/core/npu/NPUErrorCodes.h (207001)", "master, 2026-08"),
        ),
        triggers=("EL0004", "207001", "MEMORY_ALLOCATION", "apply for memory", "Malloc", "emAlloc"),
    ),
    text_format(
        "P6",
        MessageKind.DRIVER,
        Backend.NPU,
        r"NPU out of memory\. device id: [0-9]{1,4}",
        examples=("RuntimeError: NPU out of memory. device id: 0",),
        origins=(source("torch_npu", "csrc/framework/utils/NpuUtils.cpp", "master, 2026-08"),),
        triggers=("NPU out of memory",),
    ),
    text_format(
        "F-driver",
        MessageKind.DRIVER,
        Backend.CUDA,
        r"CUDA driver error: out of memory|\bCUDA_ERROR_OUT_OF_MEMORY\b",
        examples=(
            "RuntimeError: CUDA driver error: out of memory",
            'DriverError(CUDA_ERROR_OUT_OF_MEMORY, "out of memory")',
        ),
        origins=(
            binary("PyTorch", "c10/cuda/driver_api.h", "2.1.2 to 2.14.0"),
            documented("CUDA driver, cudarc", "names of result codes", "all"),
        ),
        triggers=("CUDA_ERROR_OUT_OF", "CUDA driver error"),
    ),
    text_format(
        "F-async",
        MessageKind.DRIVER,
        Backend.CUDA,
        r"would exceed allowed memory\. \(out of memory\)",
        examples=("Allocation on device 0 would exceed allowed memory. (out of memory)",),
        origins=(binary("PyTorch", "c10/cuda/CUDAMallocAsyncAllocator.cpp", "2.0.1 to 2.14.0"),),
        triggers=("allowed memory",),
    ),
    text_format(
        "K1",
        MessageKind.DRIVER,
        Backend.CUDA,
        rf"allocating (?P<size>{SIZE}) on device [0-9]{{1,3}}: cudaMalloc failed"
        r"|cudaMalloc(?:Async)?(?: retry)? failed:? out of memory",
        examples=(
            "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 590.07 MiB on device 0: "
            "cudaMalloc failed: out of memory",
            "MXNetError: cudaMalloc retry failed: out of memory",
        ),
        origins=(
            reported("llama.cpp", "ggml/src/ggml-cuda/ggml-cuda.cu", "b2000 and later"),
            source("MXNet", "src/storage/pooled_storage_manager.h", "1.x"),
        ),
        triggers=("cudaMalloc",),
    ),
    text_format(
        "F-bare",
        MessageKind.DRIVER,
        Backend.CUDA,
        r"CUDA error: out of memory|cudaErrorMemoryAllocation"
        r"|CUDA runtime error.{0,20}out of memory|CUDA error 2\b.{0,40}out of memory",
        examples=(
            "RuntimeError: CUDA error: out of memory",
            "CUDA runtime error (2) : out of memory",
        ),
        origins=(
            binary("PyTorch", "c10/cuda/CUDAException.cpp", "1.13.1 to 2.14.0"),
            documented("CUDA runtime", "names of result codes", "all"),
        ),
        triggers=("cudaErrorMemoryAllocation", "CUDA error", "CUDA runtime error"),
    ),
    text_format(
        "R-bare",
        MessageKind.DRIVER,
        Backend.HIP,
        r"HIP (?:driver )?error: out of memory|hipErrorOutOfMemory"
        r"|HSA_STATUS_ERROR_OUT_OF_RESOURCES",
        examples=(
            "RuntimeError: HIP error: out of memory",
            "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources",
        ),
        origins=(
            reported("PyTorch", "hipified c10/hip/HIPException.cpp", "1.10 to 2.14"),
            documented("ROCr", "hsa.h, status codes", "all"),
        ),
        triggers=("hipErrorOutOfMemory", "HIP error", "HSA_STATUS_ERROR_OUT"),
    ),
)
UNNAMED = (
    text_format(
        "N3",
        MessageKind.DRIVER,
        Backend.UNKNOWN,
        r"CU(?:BLAS|DNN|SOLVER|SPARSE)_STATUS_NOT_INITIALIZED",
        examples=(
            "RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling "
            "`cublasCreate(handle)`",
        ),
        origins=(documented("cuBLAS, cuDNN", "status names; often a full card", "all"),),
        triggers=("_STATUS_NOT_INITIALIZED",),
    ),
    text_format(
        "P5",
        MessageKind.DRIVER,
        Backend.UNKNOWN,
        r"Failed to allocate memory",
        examples=("Failed to allocate memory",),
        origins=(source("torch_npu", "csrc/core/npu/NPUException.cpp", "master, 2026-08"),),
        triggers=("allocate memory",),
    ),
)
