"""What removes a fault that no smaller recipe fixes, with the lines that do it in each launcher."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.shared.memory.forensics.diagnosis import Cause, Launcher, LauncherLine, Remedy
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import FailurePhase, Framework
from services.shared.memory.forensics.remedies.launcher_lines import (
    accelerate,
    checkpointing,
    deepspeed,
    fused_update,
    layer_wrapping,
    sharding,
    suitable,
    transformers,
)
from services.shared.memory.oom_log.message_formats import Backend
from services.shared.memory.oom_log.traceback_sites import Site
from services.shared.memory.planning.plan_contract import Verdict

Lines = Callable[[Evidence], Iterator[LauncherLine]]
# torch: c10/core/AllocatorConfig.cpp and the allocators of the back ends.
_ALLOCATOR_VARIABLES = {
    Backend.HIP: "PYTORCH_HIP_ALLOC_CONF",
    Backend.NPU: "PYTORCH_NPU_ALLOC_CONF",
    Backend.MLU: "PYTORCH_MLU_ALLOC_CONF",
}
_LISTS_OF_PROCESSES = {
    Backend.HIP: "rocm-smi --showpids",
    Backend.NPU: "npu-smi info",
    Backend.MLU: "cnmon",
    Backend.HPU: "hl-smi",
    Backend.XPU: "xpu-smi ps",
}
_VISIBLE_DEVICES = {
    Backend.HIP: "HIP_VISIBLE_DEVICES",
    Backend.NPU: "ASCEND_RT_VISIBLE_DEVICES",
    Backend.MLU: "MLU_VISIBLE_DEVICES",
    Backend.XPU: "ZE_AFFINITY_MASK",
}


def environment(variable: str, value: str) -> Iterator[LauncherLine]:
    """Yield an environment variable for a shell and for a container."""
    yield LauncherLine(Launcher.ENVIRONMENT, f"export {variable}={value}")
    yield LauncherLine(Launcher.DOCKER, f"--env {variable}={value}")


def shell(line: str) -> LauncherLine:
    """Return a command of a shell."""
    return LauncherLine(Launcher.SHELL, line)


def python(line: str) -> LauncherLine:
    """Return a line of the training script."""
    return LauncherLine(Launcher.PYTHON, line)


def direct_fixes(evidence: Evidence, cause: Cause) -> list[Remedy]:
    """Return what removes the fault itself; empty where only a smaller recipe helps."""
    fault = _FIXES.get(cause)
    if fault is None:
        return []
    change, costs, lines = fault
    found = suitable(evidence, list(lines(evidence)))
    return [Remedy(change, None, Verdict.UNKNOWN, costs, lines=found)]


def _backend(evidence: Evidence) -> Backend:
    return evidence.message.backend if evidence.message else Backend.UNKNOWN


def _fragmentation(evidence: Evidence) -> Iterator[LauncherLine]:
    variable = _ALLOCATOR_VARIABLES.get(_backend(evidence), "PYTORCH_CUDA_ALLOC_CONF")
    yield from environment(variable, "expandable_segments:True")


def _checkpoint(_evidence: Evidence) -> Iterator[LauncherLine]:
    yield accelerate("fsdp_state_dict_type: SHARDED_STATE_DICT", section="fsdp_config")
    yield deepspeed(zero_optimization={"stage3_gather_16bit_weights_on_model_save": False})
    yield python(
        "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))"
    )


def _outside(_evidence: Evidence) -> Iterator[LauncherLine]:
    # NCCL's default is 4 MiB a channel (nccl, src/include/comm.h: NCCL_BUFFSIZE).
    yield from environment("NCCL_BUFFSIZE", "1048576")
    yield from environment("CUDA_MODULE_LOADING", "LAZY")


def _other_process(evidence: Evidence) -> Iterator[LauncherLine]:
    backend = _backend(evidence)
    nvidia = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv"
    yield shell(_LISTS_OF_PROCESSES.get(backend, nvidia))
    yield from environment(_VISIBLE_DEVICES.get(backend, "CUDA_VISIBLE_DEVICES"), "1")


def _driver(_evidence: Evidence) -> Iterator[LauncherLine]:
    yield shell("sudo sysctl -w vm.max_map_count=1048576")
    yield shell("ulimit -l unlimited")
    yield LauncherLine(Launcher.DOCKER, "--ulimit memlock=-1")


def _upcast(_evidence: Evidence) -> Iterator[LauncherLine]:
    yield python("AutoModel.from_pretrained(name, torch_dtype=torch.bfloat16)")
    yield accelerate('mixed_precision: "no"', section="")


def _coarse(evidence: Evidence) -> Iterator[LauncherLine]:
    yield from layer_wrapping(evidence)
    if evidence.trains_adapters:
        yield accelerate("fsdp_use_orig_params: true", section="fsdp_config")
        yield python("policy = peft.utils.other.fsdp_auto_wrap_policy(model)")


def _activations(evidence: Evidence) -> Iterator[LauncherLine]:
    if evidence.phase is FailurePhase.EVALUATE:
        yield transformers("--eval_accumulation_steps 1 --per_device_eval_batch_size 1")
        return
    if Site.LOSS in evidence.sites:
        yield transformers("--use_liger_kernel true")
    if Site.ATTENTION in evidence.sites:
        yield python('AutoModel.from_pretrained(name, attn_implementation="flash_attention_2")')
    if evidence.case.activation_checkpointing is not True:
        yield from checkpointing(evidence)
    batch = evidence.case.micro_batch
    if batch is None or batch > 1:
        steps = (evidence.case.accumulate or 1) * (batch or 1)
        yield transformers(f"--per_device_train_batch_size 1 --gradient_accumulation_steps {steps}")
        yield deepspeed(train_micro_batch_size_per_gpu=1, gradient_accumulation_steps=steps)
    else:
        yield transformers("--use_liger_kernel true")


def _own_ranks(evidence: Evidence) -> Iterator[LauncherLine]:
    if Site.UNPICKLING in evidence.sites:
        yield python('state = torch.load(path, map_location=f"cuda:{local_rank}")')
    yield python('torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))')
    yield shell("export CUDA_VISIBLE_DEVICES=$LOCAL_RANK  # in the script of each rank")


def _shared(_evidence: Evidence) -> Iterator[LauncherLine]:
    yield LauncherLine(Launcher.DOCKER, "--shm-size=16g")
    yield LauncherLine(Launcher.COMPOSE, "shm_size: 16gb")
    yield LauncherLine(
        Launcher.KUBERNETES,
        "{name: shm, emptyDir: {medium: Memory, sizeLimit: 16Gi}}  # a volume, mounted at /dev/shm",
    )
    yield transformers("--dataloader_num_workers 0")
    yield python('torch.multiprocessing.set_sharing_strategy("file_system")')


def _server(_evidence: Evidence) -> Iterator[LauncherLine]:
    yield LauncherLine(
        Launcher.VLLM,
        "--gpu-memory-utilization 0.95 --max-model-len 8192 --max-num-seqs 64 --enforce-eager",
    )
    yield LauncherLine(
        Launcher.SGLANG, "--mem-fraction-static 0.8 --context-length 8192 --disable-cuda-graph"
    )


def _kernel(_evidence: Evidence) -> Iterator[LauncherLine]:
    yield python('triton.Config({"BLOCK_M": 64, "BLOCK_N": 64}, num_stages=1, num_warps=4)')
    yield from environment("TORCHINDUCTOR_MAX_AUTOTUNE", "0")


def _pinned(_evidence: Evidence) -> Iterator[LauncherLine]:
    yield LauncherLine(Launcher.DOCKER, "--ulimit memlock=-1")
    yield shell("ulimit -l unlimited")
    offload = {"device": "cpu", "pin_memory": False}
    yield deepspeed(zero_optimization={"offload_optimizer": offload, "offload_param": offload})
    yield transformers("--dataloader_pin_memory false")


_FIXES: dict[Cause, tuple[str, str, Lines]] = {
    Cause.CHECKPOINT_GATHER: (
        "save a sharded state dict, or gather on rank 0 only with offload to the CPU",
        "a sharded checkpoint has to be consolidated before others can load it",
        _checkpoint,
    ),
    Cause.FRAGMENTATION: (
        "expandable segments of the allocator, where the build supports them",
        "none known on CUDA; not every HIP build has it",
        _fragmentation,
    ),
    Cause.OUTSIDE_ALLOCATOR: (
        "share one device mesh and its process groups over all units; compare the driver's view of "
        "the card (nvidia-smi, rocm-smi, hy-smi) with what torch has reserved",
        "smaller buffers make collectives slower",
        _outside,
    ),
    Cause.OTHER_PROCESS: (
        "find the other process in the driver's list, outside of the container, and end it or "
        "choose another card",
        "none",
        _other_process,
    ),
    Cause.DRIVER_LIMIT: (
        "check below torch: map count and locked-memory limits, pinned buffers, versions of driver "
        "and collective library; a smaller batch will not help",
        "none",
        _driver,
    ),
    Cause.FP32_UPCAST: (
        "keep the shards in the dtype of the checkpoint: no mixed-precision flag, AdamW with "
        "stochastic rounding in bfloat16",
        "8 bits of mantissa in parameters and moments",
        _upcast,
    ),
    Cause.WRAP_TOO_COARSE: (
        "wrap every transformer layer, and embedding and output head, as units of their own; never "
        "frozen and trainable parameters in one unit",
        "a few more gathers a step",
        _coarse,
    ),
    Cause.LOGITS_OR_ACTIVATIONS: (
        "a chunked or fused loss, activation checkpointing, fused attention, shorter texts",
        "chunking costs a few percent of time; checkpointing about a third",
        _activations,
    ),
    Cause.OWN_RANKS_ON_CARD: (
        "torch.cuda.set_device(local_rank) before the first collective or tensor, or one visible "
        "device a rank",
        "none",
        _own_ranks,
    ),
    Cause.SHARED_MEMORY: (
        "a larger /dev/shm (docker run --shm-size), or no worker processes for the data",
        "pages of /dev/shm count as host memory",
        _shared,
    ),
    Cause.SERVING_START_UP: (
        "a larger share of the card for the cache, fewer and shorter requests, or more cards by "
        "tensor parallelism",
        "shorter or fewer concurrent requests",
        _server,
    ),
    Cause.NOT_DEVICE_MEMORY: (
        "smaller blocks or fewer num_stages of the kernel, or a version tuned for this card",
        "the kernel may be slower; the card's memory does not matter",
        _kernel,
    ),
    Cause.PINNED_MEMORY: (
        "lift the limit of locked memory, or do not pin",
        "transfers from pageable memory are slower",
        _pinned,
    ),
    Cause.OPTIMIZER_TEMPORARIES: (
        "the fused optimizer, or foreach=False; for ZeRO-3 smaller sub-groups",
        "none for fused; the loop over parameters is slower",
        fused_update,
    ),
}


def smaller_jobs(evidence: Evidence, cause: Cause) -> list[Remedy]:
    """Return what makes any job smaller, where its model is not known well enough to plan it."""
    if cause is not Cause.CAPACITY:
        return []
    lines: list[LauncherLine] = []
    if not evidence.trains_adapters:
        lines.append(transformers("--optim adamw_bnb_8bit"))
    lines += checkpointing(evidence)
    if (evidence.ranks or 1) > 1 and not evidence.shards_parameters:
        lines += sharding(evidence)
    change = "less state and fewer activations: 8-bit moments, checkpointing, sharding, more ranks"
    costs = "not planned: model or ranks are not known"
    return [Remedy(change, None, Verdict.UNKNOWN, costs, lines=suitable(evidence, lines))]


def host_lines(evidence: Evidence, needed_bytes: int | None) -> tuple[LauncherLine, ...]:
    """Return the lines that give a job more host memory, or let it hold less."""
    gib = -(-(needed_bytes or 0) // 2**30)
    lines: list[LauncherLine] = []
    if gib:
        lines.append(LauncherLine(Launcher.SLURM, f"#SBATCH --mem={gib}G"))
        lines.append(LauncherLine(Launcher.DOCKER, f"--memory={gib}g"))
    return suitable(evidence, lines)


def loading_lines(evidence: Evidence) -> tuple[LauncherLine, ...]:
    """Return the lines by which rank 0 alone reads the checkpoint, or each rank only its slices."""
    if evidence.framework in (Framework.ZERO1, Framework.ZERO2, Framework.ZERO3):
        lines = [accelerate("zero3_init_flag: true", section="deepspeed_config")]
    else:
        lines = [
            accelerate("fsdp_cpu_ram_efficient_loading: true", section="fsdp_config"),
            accelerate("fsdp_sync_module_states: true", section="fsdp_config"),
        ]
    lines.append(
        python(
            "AutoModel.from_pretrained(name, low_cpu_mem_usage=True, torch_dtype=torch.bfloat16)"
        )
    )
    return suitable(evidence, lines)
