"""Parse free text about a job: sharding strategy, precision, optimizer, phase, device."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from services.shared.memory.errors import InvalidInput
from services.shared.memory.hardware import DEVICES, find_device
from services.shared.memory.recipe import Optimizer, OptimizerImpl, Precision, Sharding
from services.shared.memory.sizes import GIB


class Framework(str, Enum):
    """The framework configured to distribute the training; not necessarily what happened."""

    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    DDP = "ddp"
    NONE = "none"

    __str__ = str.__str__

    @property
    def shards_parameters(self) -> bool:
        """Whether each rank keeps only its share of the parameters."""
        return self in (Framework.FSDP1, Framework.FSDP2, Framework.ZERO3)


class FailurePhase(str, Enum):
    """The phase in which the memory ran out, as reported."""

    LOAD = "load"
    WRAP = "wrap"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER_STEP = "optimizer_step"
    SAVE = "save"
    EVALUATE = "evaluate"
    TRAIN = "train"

    __str__ = str.__str__


@dataclass(frozen=True)
class ShardingSettings:
    """The settings in a sentence about sharding; None where it does not say."""

    framework: Framework | None = None
    sharding: Sharding | None = None
    offload: bool = False
    efficient_loading: bool = False  # rank 0 alone reads the checkpoint, into host memory
    integer_reshard: bool = False  # FSDP2 with a reshard group of its own per unit


# Every repetition in this file is bounded: the text is a user's, and `\s*...\s*` takes cubic time.
_ZERO_STAGE = re.compile(r"(?:zero|stage|z)[\s_-]{0,4}(?:stage)?[\s_-]{0,4}(<?)\s{0,4}([0-3])\b")
_NOT_SHARDED = re.compile(
    r"^\s*(?:none|no\b|not\b)|\bddp\b|data[\s_-]?parallel\b|multi_gpu|single[\s-](?:gpu|card|process)"
    r"|\bone (?:gpu|card)|no_shard"
)


def read_strategy(text: str) -> ShardingSettings:
    """Parse text such as "FSDP1 full_shard auto_wrap" or "DeepSpeed ZeRO-2, offload"."""
    low = text.lower()
    return ShardingSettings(
        framework=_framework(low),
        sharding=_sharding(low),
        offload="offload" in low and not re.search(r"(?:no|without) (?:cpu )?offload", low),
        efficient_loading="cpu_ram_efficient" in low or "efficient loading" in low,
        integer_reshard=bool(
            re.search(r"reshard_after_forward\s{0,8}[=:]\s{0,8}(?:int|[0-9])", low)
        ),
    )


# One model over several devices by layers or by slices: no rank holds all of it, unsharded or not.
_SPLIT = re.compile(r"device_map|(?:model|tensor|pipeline|expert)[\s_-]*parallel|megatron")


def _framework(low: str) -> Framework | None:
    stated = _named_framework(low)
    return None if stated in (Framework.DDP, Framework.NONE) and _SPLIT.search(low) else stated


def _named_framework(low: str) -> Framework | None:
    # The beginning decides: "none (DDP)", "none active at load", but "FSDP1 (not DDP)".
    if re.match(r"\s*(?:none|no\b|one gpu|single)", low):
        return Framework.DDP if re.search(r"ddp|multi_gpu|data", low) else Framework.NONE
    # fully sharded data parallel must not read as plain data parallel
    if re.search(r"fsdp\s*v?2|fully_shard\b", low):
        return Framework.FSDP2
    if re.search(r"fsdp|hsdp|full[y]?[\s_-]shard|shard_grad_op|hybrid_shard", low):
        return Framework.FSDP1
    stage = _ZERO_STAGE.search(low)
    if stage and ("zero" in low or "deepspeed" in low or "stage" in low):
        number = int(stage[2]) - (1 if stage[1] else 0)
        return {3: Framework.ZERO3, 2: Framework.ZERO2, 1: Framework.ZERO1}.get(
            number, Framework.DDP
        )
    if _NOT_SHARDED.search(low):
        return Framework.DDP
    return None


def _sharding(low: str) -> Sharding | None:
    if re.search(r"shard_grad_op|grad_op|reshard_after_forward\s{0,8}[=:]\s{0,8}false", low):
        return Sharding.GRAD_OP
    if re.search(r"hybrid|hsdp", low):
        return Sharding.HYBRID
    if "no_shard" in low:
        return Sharding.NONE
    if re.search(r"full[\s_-]?shard", low):
        return Sharding.FULL
    return None


@dataclass(frozen=True)
class PrecisionSettings:
    """The settings in a sentence about precision."""

    parameters: Precision | None = None
    mixed: bool = False
    bits: int | None = None  # 4 or 8 where the weights are quantised
    full_eval: bool = False  # the trainer casts and moves the model before anything wraps it


_FLOAT32 = r"fp32|float32|full precision"
_HALF = r"bf16|bfloat16|fp16|float16|half|2 bytes"


def read_precision(text: str) -> PrecisionSettings:
    """Parse text such as "fp32 parameters, fp16 compute" or "GPTQ int4"."""
    low = text.lower()
    quantised = re.search(r"int4|nf4|4[\s-]?bit|gptq|awq|qlora|mxfp4", low)
    eight = re.search(r"int8|8[\s-]?bit(?! adam)", low)
    mixed = bool(re.search(r"mixed|\bamp\b|autocast|fp32 (?:param|master|state)", low))
    parameters = None
    if re.search(rf"(?:{_FLOAT32})[\s-]{0, 4}(?:param|weight|master|state)", low):
        parameters = Precision.FLOAT32
    elif re.search(rf"pure[\s_-]?(?:{_HALF})|(?:{_HALF})[\s-]{0, 4}(?:param|weight|state)", low):
        parameters = None if mixed else Precision.BFLOAT16
    elif re.search(rf"\b(?:{_FLOAT32})\b", low) and not re.search(_HALF, low):
        parameters = Precision.FLOAT32
    return PrecisionSettings(
        parameters=parameters,
        mixed=mixed,
        bits=4 if quantised else 8 if eight else None,
        full_eval="full_eval" in low,
    )


def read_optimizer(text: str) -> tuple[Optimizer | None, OptimizerImpl | None]:
    """Parse text such as "AdamW (foreach default)" or "adamw_torch_fused"."""
    low = text.lower()
    kind = None
    if "adafactor" in low:
        kind = Optimizer.ADAFACTOR
    elif re.search(r"8[\s_-]?bit|bnb", low):
        kind = Optimizer.ADAMW_8BIT
    elif "adam" in low:
        kind = Optimizer.ADAMW_BF16 if "bf16" in low else Optimizer.ADAMW
    elif "sgd" in low:
        kind = Optimizer.SGD
    implementation = None
    if "fused" in low:
        implementation = OptimizerImpl.FUSED
    elif "foreach" in low and "foreach=false" not in low.replace(" ", ""):
        implementation = OptimizerImpl.FOREACH
    elif "for_loop" in low or "foreach=false" in low.replace(" ", ""):
        implementation = OptimizerImpl.FOR_LOOP
    return kind, implementation


_PHASES: tuple[tuple[FailurePhase, str], ...] = (
    (FailurePhase.SAVE, r"sav(?:e|ing)|export|resum|checkpointing to|state_dict|consolidat"),
    (FailurePhase.OPTIMIZER_STEP, r"optimi[sz]er[\s_.]?(?:step|init|state)|optim\b|\bopt\b"),
    (FailurePhase.LOAD, r"load|from_pretrained|start(?:up|ing)|\binit"),
    (FailurePhase.WRAP, r"wrap|prepare|shard"),
    (FailurePhase.FORWARD, r"forward|\bloss\b"),
    (FailurePhase.BACKWARD, r"backward"),
    (FailurePhase.EVALUATE, r"eval|validat|generat|infer|rollout"),
    (FailurePhase.TRAIN, r"train|step|fine"),
)


def read_phase(text: str) -> FailurePhase | None:
    """Return the phase that the text names first: "load then backward" is loading."""
    low = text.lower()
    places = [(m.start(), phase) for phase, words in _PHASES if (m := re.search(words, low))]
    return min(places, key=lambda place: place[0])[1] if places else None


_MEMORY = re.compile(r"\b([0-9]{1,4})\s?g(?:i?b)?\b", re.IGNORECASE)
_CARD_RANGE = re.compile(
    r"(?:HCU|DCU|GPU|NPU|cards?|devices?)\s?([0-9]{1,3})\s?(?:-|–|to)\s?([0-9]{1,3})", re.IGNORECASE
)


def read_device(text: str) -> tuple[str | None, int | None]:
    """Return the known device kind that `text` names, and the memory bytes it states."""
    stated = _MEMORY.search(text)
    memory = int(stated[1]) * GIB if stated else None
    return _known_device(text, memory), memory


def _known_device(text: str, memory: int | None) -> str | None:
    words = re.split(r"[\s,;/()]+", text)
    named = [*words, *(f"{a}{b}" for a, b in pairwise(words))]
    kinds = set()
    for word in named:
        try:
            kinds.add(find_device(word).name)
        except InvalidInput:
            continue
    if not kinds:
        return None
    if memory is None or len(kinds) == 1:
        return sorted(kinds, key=len)[-1]
    return min(kinds, key=lambda kind: abs(DEVICES[kind].memory_bytes - memory))


def count_listed_devices(text: str) -> int | None:
    """Return the number of devices in a range such as "HCU1-7"."""
    found = _CARD_RANGE.search(text)
    if found is None:
        return None
    count = int(found[2]) - int(found[1]) + 1
    return count if 1 <= count <= 1024 else None


def vocabulary_in(text: str) -> int | None:
    """Return the vocabulary that a model's description states: "vocab 151936"."""
    found = re.search(r"vocab(?:ulary)?\D{0,10}([0-9]{4,7})", text, re.IGNORECASE)
    return int(found[1]) if found else None


_EXPERTS = re.compile(
    r"(?<![0-9.])([0-9]{1,3})x([0-9]{1,3}(?:\.[0-9]{1,3})?)b(?![a-z0-9])", re.IGNORECASE
)
_BILLIONS = re.compile(  # "7B", "0.6b", "7 billion", and "7b1" for 7.1
    r"(?<![0-9.])(?<!-A)([0-9]{1,4}(?:\.[0-9]{1,3})?)[\s_-]?b([0-9]?)(?:illion)?(?![a-z0-9])",
    re.IGNORECASE,
)
_MILLIONS = re.compile(r"(?<![0-9.])([0-9]{2,4})[\s_-]?m(?:illion)?(?![a-z0-9])", re.IGNORECASE)
# Experts share attention and embeddings: Mixtral-8x7B has 46.7 B parameters, 8x22B 140.6 B.
_SHARE_OF_EXPERTS = 0.82


def parameters_in_name(text: str) -> int | None:
    """Return the number of parameters that a model's name states: "LLaDA-8B" or "bloom-560m"."""
    experts = _EXPERTS.search(text)
    if experts:
        return int(int(experts[1]) * float(experts[2]) * _SHARE_OF_EXPERTS * 10**9)
    billions, millions = _BILLIONS.search(text), _MILLIONS.search(text)
    if billions:
        number = f"{billions[1]}.{billions[2]}" if billions[2] else billions[1]
        return int(float(number) * 10**9) or None if number.count(".") < 2 else None
    return int(millions[1]) * 10**6 or None if millions else None
