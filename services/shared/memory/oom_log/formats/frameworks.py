"""Texts of other frameworks that people train and serve with: their allocators and runtimes."""

from __future__ import annotations

from services.shared.memory.oom_log.formats.text_format import (
    BYTES,
    reported,
    source,
    text_format,
)
from services.shared.memory.oom_log.message_formats import SIZE, Backend, MessageKind

# Sizes as Paddle prints them: six decimals, units of 1024.
_PADDLE_SIZE = r"[0-9]{1,9}(?:\.[0-9]{1,6})?[kMGT]B"

FRAMEWORKS = (
    text_format(
        "W1",
        MessageKind.PROSE,
        Backend.UNKNOWN,
        rf"Out of memory error on GPU [0-9]{{1,4}}\. Cannot allocate (?P<size>{_PADDLE_SIZE}) memory "
        rf"on GPU [0-9]{{1,4}}, (?P<held>{_PADDLE_SIZE}) memory has been allocated",
        examples=(
            "Out of memory error on GPU 0. Cannot allocate 128.000000MB memory on GPU 0, "
            "23.431824GB memory has been allocated and available memory is only 97.625000MB.",
        ),
        origins=(reported("PaddlePaddle", "paddle/fluid/memory/allocation", "2.x, 3.x"),),
        triggers=("Out of memory error on GPU",),
    ),
    text_format(
        "W2",
        MessageKind.PROSE,
        Backend.UNKNOWN,
        rf"Failed to allocate memory for requested buffer of size {BYTES}"
        r"|Available memory of [0-9]{1,18} is smaller than requested bytes of (?P<wanted>[0-9]{1,18})",
        examples=(
            "BFCArena::AllocateRawInternal Failed to allocate memory for requested buffer of size "
            "4294967296",
            "BFCArena::AllocateRawInternal Available memory of 34699008 is smaller than requested "
            "bytes of 945041920",
        ),
        origins=(
            source("ONNX Runtime", "onnxruntime/test/framework/bfc_arena_test.cc", "main, 2026"),
            reported("ONNX Runtime", "onnxruntime/core/framework/bfc_arena.cc", "1.x"),
        ),
        triggers=("for requested buffer", "smaller than requested"),
    ),
    text_format(
        "W3",
        MessageKind.PROSE,
        Backend.UNKNOWN,
        rf"Could not allocate tensor with {BYTES} (?:bytes|index elements)\. "
        r"There is not enough GPU video memory available",
        examples=(
            "RuntimeError: Could not allocate tensor with 134217728 bytes. There is not enough GPU "
            "video memory available!",
        ),
        origins=(reported("torch-directml", "-", "0.1, 0.2"),),
        triggers=("enough GPU video memory",),
    ),
    text_format(
        "W4",
        MessageKind.PROSE,
        Backend.UNKNOWN,
        r"Out of memory allocating (?P<tried>[0-9,]{1,24}) bytes \(allocated so far: "
        r"(?P<held>[0-9,]{1,24} bytes)",
        examples=(
            "Out of memory allocating 393,216,000 bytes (allocated so far: 84,043,158,016 bytes).",
        ),
        origins=(reported("CuPy", "cupy/cuda/memory.pyx", "9 to 14"),),
        triggers=("Out of memory allocating",),
    ),
    text_format(
        "W5",
        MessageKind.PROSE,
        Backend.UNKNOWN,
        r"Ran out of memory in memory space hbm"
        r"|Error allocating device buffer: Attempting to allocate",
        examples=(
            "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
            "hbm. Used 35.83G of 31.25G hbm. Exceeded hbm capacity by 4.59G.",
            "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 1.17G. That "
            "was not possible. There are 1.06G free.",
        ),
        origins=(reported("XLA on TPU", "-", "2023 to 2026"),),
        triggers=("memory space hbm", "allocating device buffer"),
    ),
    text_format(
        "W6",
        MessageKind.DRIVER,
        Backend.CUDA,
        r"out_of_memory: CUDA error|thrust::system::system_error.{0,120}out of memory"
        r"|Cuda Runtime \(out of memory\)|OutOfMemory \(Requested size was (?P<tried>[0-9]{1,18}) bytes"
        r"|CUDA runtime error in .{0,80}: out of memory|unable to allocate CUDA[0-9] buffer",
        examples=(
            "MemoryError: std::bad_alloc: out_of_memory: CUDA error at: "
            "/rmm/mr/device/cuda_memory_resource.hpp",
            "terminate called after throwing an instance of 'thrust::system::system_error' what(): "
            "parallel_for failed: cudaErrorMemoryAllocation: out of memory",
            "[TRT] [E] 1: [defaultAllocator.cpp::allocate::20] Error Code 1: Cuda Runtime (out of "
            "memory)",
            "[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMalloc(ptr, size): out of memory",
        ),
        origins=(
            reported("RAPIDS memory manager", "cuda_memory_resource.hpp", "0.19 to 26"),
            reported("TensorRT and TensorRT-LLM", "defaultAllocator.cpp", "8 to 10"),
            reported("Thrust", "system_error.h", "CUDA 10 to 13"),
            reported("llama.cpp", "src/llama-model.cpp", "b2000 and later"),
        ),
        triggers=(
            "CUDA error at",
            "system_error",
            "Cuda Runtime",
            "OutOfMemory",
            "runtime error in",
            "CUDA0 buffer",
        ),
    ),
    text_format(
        "W7",
        MessageKind.PROSE,
        Backend.UNKNOWN,
        r"Some modules are dispatched on the CPU or the disk\. Make sure you have enough GPU RAM",
        examples=(
            "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have "
            "enough GPU RAM to fit the quantized model.",
        ),
        origins=(
            source("transformers", "src/transformers/quantizers/quantizer_bnb_4bit.py", "4.x, 5.x"),
        ),
        triggers=("modules are dispatched on",),
    ),
    text_format(
        "W8",
        MessageKind.PROSE,
        Backend.MPS,
        rf"Insufficient Memory \([0-9a-f:]{{1,12}}kIOGPU|kIOGPUCommandBufferCallbackErrorOutOfMemory"
        rf"|Invalid buffer size: (?P<size>{SIZE})",
        examples=(
            "[METAL] Command buffer execution failed: Insufficient Memory "
            "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
            "RuntimeError: Invalid buffer size: 19.07 GB",
        ),
        origins=(
            reported("Metal", "IOGPU command buffer errors", "macOS 12 to 26"),
            reported("PyTorch", "aten/src/ATen/mps/MPSAllocator.mm", "1.12 to 2.14"),
        ),
        triggers=("Insufficient Memory", "kIOGPU", "Invalid buffer size"),
    ),
    text_format(
        "W9",
        MessageKind.PROSE,
        Backend.HPU,
        r"synStatus.{0,40}(?:[Nn]ot enough memory|[Mm]emory allocation failed)"
        r"|Graph compile failed.{0,80}synStatus=?\s?(?:synStatus )?8 ",
        examples=("synNodeCreateWithId failed: synStatus=8 [Device not enough memory]",),
        origins=(reported("Gaudi", "synapse status texts", "1.10 to 1.20"),),
        triggers=("synStatus",),
    ),
    text_format(
        "R-miopen",
        MessageKind.DRIVER,
        Backend.HIP,
        rf"Memory not available to allocate buffer: {BYTES}",
        examples=(
            "MIOpen Error: /MIOpen/src/hip/handlehip.cpp:82: Memory not available to allocate "
            "buffer: 99000000",
        ),
        origins=(source("MIOpen", "src/hip/handlehip.cpp", "develop, 2024"),),
        triggers=("not available to allocate",),
    ),
)
