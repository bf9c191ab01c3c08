"""What the lines around a failure say: the place in the program, and earlier warnings."""

import re
from enum import Enum


class Site(str, Enum):
    """A place in the program that a traceback or a report names."""

    LOADING = "loading"
    MOVING = "moving"  # .to(device), .cuda()
    WRAPPING = "wrapping"
    GATHERING = "gathering"  # un-sharding a unit
    FORWARD = "forward"
    ATTENTION = "attention"
    LOSS = "loss"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"
    STATE = "state"  # the optimizer's state is created, in its first step
    FOREACH = "foreach"  # multi-tensor optimizer
    SAVING = "saving"
    EVALUATING = "evaluating"
    GENERATING = "generating"
    COLLECTIVE = "collective"
    SERVER_START = "server_start"  # an inference server loads, profiles or reserves its cache
    PINNING = "pinning"  # locking host memory
    UNPICKLING = "unpickling"  # torch.load puts tensors where they were saved from

    __str__ = str.__str__


class Note(str, Enum):
    """A warning, printed before or after a failure, that says something about memory."""

    UPCAST = "parameters were upcast to float32"
    ZERO3_INIT_OFF = "zero.Init was switched off: the ZeRO stage is below 3"
    MIXED_REQUIRES_GRAD = "one FSDP unit mixes frozen and trainable parameters"
    NO_SHARD = "FSDP switched itself to NO_SHARD"
    DATA_PARALLEL = "the run is data parallel without sharding"
    CACHE_FLUSHES = "the allocator had to flush its cache under pressure"
    CLONE_FAILED = "cloning a tensor of the state dict failed"
    FOUR_BIT = "the weights are quantised to 4 bits"
    EIGHT_BIT = "the weights are quantised to 8 bits"
    ADAPTERS = "only adapters are trained"
    INFERENCE_SERVER = "an inference server was started"
    COLLECTIVE_TIMEOUT = "a collective timed out, as it does when another rank has died"

    __str__ = str.__str__


_SITES: tuple[tuple[Site, str], ...] = (
    (
        Site.SERVER_START,
        r"determine_(?:available_memory|num_available_blocks)|, in profile_run\b|capture_model\b"
        r"|_?initialize_kv_caches?\b|init_memory_pool|init_cuda_graphs|init_device_graphs"
        r"|(?:vllm|sglang|lmdeploy)/[\w/.]{0,80}(?:model_loader|load_model)"
        r"|(?:vllm|sglang)/[\w/.]{0,80}, line [0-9]{1,6}, in load_model"
        r"|text_generation_server/[\w/.\", ]{0,80}line [0-9]{1,6}, in warmup",
    ),
    (Site.PINNING, r"\bpin_memory\("),
    (Site.UNPICKLING, r"torch/serialization\.py|\btorch\.load\("),
    (
        Site.LOADING,
        r"from_pretrained|load_state_dict|set_module_tensor_to_device|load_checkpoint"
        r"|\bload_model\b|load_shard_file|materialize_|_load_pretrained",
    ),
    (Site.MOVING, r"_move_model_to_device|model\.to\(|\.cuda\(\)|, in convert\b|, in _apply\b"),
    (
        Site.WRAPPING,
        r"_auto_wrap|_init_param_handle|flatten_tensors|_init_flat_param|fully_shard\b"
        r"|FullyShardedDataParallel\(|DistributedDataParallel\(|_sync_module_states",
    ),
    (
        Site.GATHERING,
        r"_alloc_padded_unsharded_flat_param|_all_gather_flat_param|all_gather_copy_out"
        r"|foreach_all_gather|GatheredParameters|_allgather_params|, in unshard\b",
    ),
    (Site.FORWARD, r", in forward\b|\bforward pass\b"),
    (
        Site.ATTENTION,
        r"scaled_dot_product|attn_weights|attention_scores|causal_mask|attention[_ ]mask"
        r"|eager_attention",
    ),
    (Site.LOSS, r"cross_entropy|log_softmax|lm_head\(|\blogits\b|CrossEntropyLoss"),
    (Site.BACKWARD, r"\.backward\(|run_backward|, in backward\b|\bbackward pass\b"),
    (
        Site.OPTIMIZER,
        r"optimizer\.step|optim/(?:_multi_tensor|adamw?|sgd|optimizer)|_multi_tensor_adamw?"
        r"|_foreach_(?:sqrt|add|mul|div|lerp|addc)",
    ),
    (Site.STATE, r"_init_group|\[.exp_avg(?:_sq)?.\] ?="),
    (Site.FOREACH, r"_foreach_|_multi_tensor_"),
    (
        Site.SAVING,
        r"save_checkpoint|save_model|save_pretrained|_save_to_state_dict|full_state_dict"
        r"|get_state_dict|get_model_state_dict|\.state_dict\(|Failed to clone\(\) tensor"
        r"|, in state_dict\b|_zero3_consolidated|summon_full_params|\.full_tensor\(|optim_state_dict"
        r"|\btorch\.save\(|, in save_state\b|_load_optimizer_and_scheduler|load_optimizer_state",
    ),
    (Site.EVALUATING, r"evaluation_loop|prediction_step|, in evaluate\b"),
    (Site.GENERATING, r", in generate\b|\.generate\("),
    (Site.COLLECTIVE, r"ncclCommInit|init_process_group|ProcessGroup(?:NCCL|HCCL)|NCCL error"),
)
_SITE_EXPRESSION = re.compile("|".join(f"(?P<{site.name}>{text})" for site, text in _SITES))

_NOTES: tuple[tuple[Note, str], ...] = (
    (Note.UPCAST, r"[Uu]pcast(?:ed|ing) low precision parameters"),
    (Note.ZERO3_INIT_OFF, r"Zero3 Init flag is only applicable"),
    (
        Note.MIXED_REQUIRES_GRAD,
        r"mixed `?requires_grad|both parameters with `?requires_grad=True`? and `?False",
    ),
    (Note.NO_SHARD, r"switching to use `?(?:ShardingStrategy\.)?NO_SHARD"),
    (
        Note.DATA_PARALLEL,
        r"Training with DataParallel|nn/parallel/(?:data_parallel|parallel_apply|replicate)\.py"
        r"|distributed_type:? ?['\"]?(?:DistributedType\.)?MULTI_GPU",
    ),
    (Note.CACHE_FLUSHES, r"pytorch allocator cache flushes since last step"),
    (Note.CLONE_FAILED, r"Failed to clone\(\) tensor with name"),
    (
        Note.FOUR_BIT,
        r"load_in_4bit['\"]?\s?[=:]\s?[Tt]rue|bnb_4bit_|Linear4bit|quantization_bit: 4",
    ),
    (Note.EIGHT_BIT, r"load_in_8bit['\"]?\s?[=:]\s?[Tt]rue|Linear8bitLt"),
    (
        Note.ADAPTERS,
        r"LoraConfig|PeftModel|peft/tuners/|lora_A\b|finetuning_type['\"]?\s?[=:]?\s?lora"
        r"|trainable params: [0-9,]{1,20} \|\|",
    ),
    (
        Note.INFERENCE_SERVER,
        r"\bvllm serve\b|vllm\.entrypoints|\bVllmWorker|\(Worker_TP[0-9]|\(EngineCore"
        r"|sglang\.launch_server|text-generation-launcher|\blmdeploy serve\b",
    ),
    (
        Note.COLLECTIVE_TIMEOUT,
        r"caught collective operation timeout|Timed out waiting .{0,80}collective"
        r"|communicator was aborted",
    ),
)
_NOTE_EXPRESSIONS = tuple((note, re.compile(text)) for note, text in _NOTES)
# One substring of each note; a chunk without any of them is not searched further.
NOTE_WORDS = (
    "low precision parameters",
    "Zero3 Init",
    "requires_grad",
    "NO_SHARD",
    "DataParallel",
    "nn/parallel/",
    "MULTI_GPU",
    "cache flushes",
    "Failed to clone()",
    "4bit",
    "8bit",
    "quantization_bit",
    "LoraConfig",
    "PeftModel",
    "peft/tuners",
    "lora_A",
    "finetuning_type",
    "trainable params",
    "vllm",
    "Vllm",
    "Worker_TP",
    "EngineCore",
    "launch_server",
    "text-generation-launcher",
    "lmdeploy",
    "ollective",
    "communicator was aborted",
    "roundup_power2_divisions",
)
_ENGINES = tuple(
    (name, re.compile(words))
    for name, words in (
        ("zero3", r"zero/(?:stage3|partition_parameters|partitioned_param)"),
        ("zero2", r"zero/stage_1_and_2"),
        ("fsdp2", r"_fully_shard/|fsdp/_fsdp_|foreach_all_gather"),
        ("fsdp1", r"fsdp/(?:fully_sharded|_flat_param|_runtime|flat_param)|FlatParam"),
        ("ddp", r"nn/parallel/distributed\.py"),
    )
)
_CLONED_TENSOR = re.compile(r"Failed to clone\(\) tensor with name ([\w.]{1,200})")
_DIVISIONS = re.compile(r"roundup_power2_divisions:([0-9]{1,3})")
_PROGRESS = re.compile(r"\b([0-9]{1,9})/[0-9]{1,9} \[[0-9:?]{2,12}<")
_LONGEST_BAR = 200  # characters from its label to its count
# Bars of anything but training: loading, preparing, evaluating, saving.
_NO_TRAINING = re.compile(
    r"load|download|fetch|resolv|map|filter|token|generat|convert|quanti|sav|eval|predict|valid|test"
    r"|prepar|process|pack|merg|captur|warm|shard|rollout|infer",
    re.IGNORECASE,
)
# Steps that trainers print one a line, with the count where they print one.
_STEP_LINES = re.compile(
    r"\{'loss': '?[0-9.]{1,20}|\bsteps?[:= ]\s{0,3}(?P<step>[0-9]{1,9})[^\n]{0,60}\bloss\b"
    r"|\biteration\s{1,8}(?P<iteration>[0-9]{1,9})/\s{0,8}[0-9]{1,9} \|"
    r"|\[Rank 0\] step=(?P<deepspeed>[0-9]{1,9}), skipped"
)
_RESUMED = re.compile(
    r"(?:[Cc]ontinuing training from global step|[Rr]esum\w{2,4} (?:training )?from (?:global )?step"
    r"|checkpoint-)\s?(?P<step>[0-9]{1,9})"
)


def sites_in(text: str) -> tuple[Site, ...]:
    """Return the sites that `text` names, in order, each once, the innermost last."""
    seen: dict[Site, None] = {}
    for found in _SITE_EXPRESSION.finditer(text):
        site = Site[found.lastgroup or ""]
        seen.pop(site, None)
        seen[site] = None
        if site is Site.OPTIMIZER and "_foreach_" in found[0]:
            seen[Site.FOREACH] = None
    return tuple(seen)


def engine_in(text: str) -> str | None:
    """Return the framework whose code a traceback runs through: fsdp1, fsdp2, zero2, zero3 or ddp."""
    return next((name for name, words in _ENGINES if words.search(text)), None)


def notes_in(text: str) -> frozenset[Note]:
    """Return the warnings that `text` holds."""
    return frozenset(note for note, expression in _NOTE_EXPRESSIONS if expression.search(text))


def cloned_tensor_in(text: str) -> str | None:
    """Return the tensor whose clone failed while a state dict was gathered, if one is named."""
    found = _CLONED_TENSOR.search(text)
    return found[1] if found else None


def power2_divisions_in(text: str) -> int | None:
    """Return the allocator's roundup_power2_divisions where the log shows that it was set."""
    found = _DIVISIONS.search(text)
    return int(found[1]) if found else None


def completed_steps_in(text: str) -> int | None:
    """Return the steps that finished in this run before the end of `text`, or None if not shown.

    Counted are training's progress bars and the lines that trainers print a step; bars of loading,
    preparing and evaluating are not, and neither are steps of the run that was resumed.
    """
    bars = [int(m[1]) for m in _PROGRESS.finditer(text) if _is_of_training(text, m.start())]
    lines = [
        int(found["step"] or found["iteration"] or found["deepspeed"] or 1)
        for found in _STEP_LINES.finditer(text)
    ]
    if not bars and not lines:
        return None
    resumed = [int(found["step"]) for found in _RESUMED.finditer(text)] if "esum" in text else []
    return max(0, max([*bars[-1:], *lines[-1:]]) - max(resumed, default=0))


def _is_of_training(text: str, count_start: int) -> bool:
    """Return whether the progress bar whose count begins at `count_start` has a label of training."""
    before = text[max(0, count_start - _LONGEST_BAR) : count_start]
    own_line = re.split(r"[\n\r\]]", before)[-1]
    return not _NO_TRAINING.search(own_line)
