"""Texts of inference servers that check their memory at start-up."""

from __future__ import annotations

from services.shared.memory.oom_log.formats.text_format import (
    GIB_NUMBER,
    reported,
    source,
    text_format,
)
from services.shared.memory.oom_log.message_formats import Backend, MessageKind

CARD_IN_USE = "V3"
CACHE_FULL = "V4"

SERVING = (
    text_format(
        "V1",
        MessageKind.SERVING,
        Backend.UNKNOWN,
        rf"Free memory on device.{{0,20}} \((?P<free_gib>{GIB_NUMBER})/(?P<total_gib>{GIB_NUMBER}) "
        r"GiB\) on startup is less than desired GPU memory utilization \([0-9.]{1,6},\s{1,3}"
        rf"(?P<wanted_gib>{GIB_NUMBER}) GiB\)",
        examples=(
            "ValueError: Free memory on device cuda:0 (12.18/23.56 GiB) on startup is less than "
            "desired GPU memory utilization (0.92, 21.67 GiB). Decrease GPU memory utilization or "
            "reduce GPU memory used by other processes.",
        ),
        origins=(reported("vLLM", "vllm/v1/worker/utils.py", "0.8 and later"),),
        triggers=("less than desired",),
    ),
    text_format(
        CARD_IN_USE,
        MessageKind.SERVING,
        Backend.UNKNOWN,
        r"The memory capacity is unbalanced\. Some GPUs may be occupied by other processes"
        r"|Error in memory profiling\. Initial free memory",
        examples=(
            "AssertionError: Error in memory profiling. Initial free memory 98.0 GiB, current free "
            "memory 100.59 GiB. This happens when other processes sharing the same container "
            "release GPU memory while vLLM is profiling during initialization.",
            "ValueError: The memory capacity is unbalanced. Some GPUs may be occupied by other "
            "processes. pre_model_load_memory=11.2, local_gpu_memory=78.1",
        ),
        origins=(
            source("SGLang", "sglang/srt/model_executor/model_runner.py", "0.5.3"),
            source("vLLM", "vllm/v1/worker/gpu_worker.py", "0.6 and later"),
        ),
        triggers=("capacity is unbalanced", "in memory profiling"),
    ),
    text_format(
        CACHE_FULL,
        MessageKind.SERVING,
        Backend.UNKNOWN,
        r"Prefill out of memory\. Try to lower your batch size",
        examples=("RuntimeError: Prefill out of memory. Try to lower your batch size.",),
        origins=(source("SGLang", "sglang/srt/managers/schedule_batch.py", "0.4, 0.5"),),
        triggers=("Prefill out of memory",),
    ),
    text_format(
        "V2",
        MessageKind.SERVING,
        Backend.UNKNOWN,
        r"No available memory for the cache blocks"
        r"|larger than the maximum number of tokens that can be stored in (?:the )?KV cache"
        r"|To serve at least one request with the model'?s'? max seq len"
        r"|larger than the available KV cache memory"
        r"|CUDA out of memory occurred when warming up"
        r"|leave no GPU memory for the KV cache"
        r"|Not enough memory\. Please try (?:to increase|increasing) --mem-fraction-static"
        r"|Capture cuda graph failed.{0,200}mem-fraction-static"
        r"|Not enough memory to handle (?:[0-9]{1,9} prefill tokens|`max_total_tokens)",
        examples=(
            "ValueError: No available memory for the cache blocks. Try increasing "
            "`gpu_memory_utilization` when initializing the engine.",
            "ValueError: To serve at least one request with the models's max seq len (40960), (5.62 "
            "GiB KV cache is needed, which is larger than the available KV cache memory (3.11 GiB).",
            "CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try "
            "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.",
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current "
            "value: self.server_args.mem_fraction_static=0.7",
            "ValueError: Loaded weights leave no GPU memory for the KV cache under "
            "--mem-fraction-static=0.88.",
            "Not enough memory to handle 4096 prefill tokens. You need to decrease "
            "`--max-batch-prefill-tokens`",
        ),
        origins=(
            source("vLLM", "vllm/v1/core/kv_cache_utils.py", "main, 2026"),
            reported("vLLM", "vllm/v1/worker/gpu_model_runner.py", "0.8 and later"),
            source("SGLang", "sglang/srt/model_executor/model_runner.py", "0.5.3"),
            reported("SGLang", "sglang/srt/model_executor/model_runner.py", "2026"),
            source(
                "text-generation-inference",
                "server/text_generation_server/models/flash_causal_lm.py, backends/v3/src/lib.rs",
                "3.3.6",
            ),
        ),
        triggers=(
            "cache blocks",
            "KV cache",
            "max seq len",
            "mem-fraction-static",
            "when warming up",
            "Not enough memory",
        ),
    ),
)
