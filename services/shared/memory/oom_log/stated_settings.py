"""The settings of a job that its log states: command lines, printed arguments, trainers' banners.

Keys are those of torchrun, accelerate, DeepSpeed, transformers, peft, LLaMA-Factory, Axolotl, Megatron
and vLLM. The first value of a setting counts: a log begins with the command or the configuration.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace

_LARGEST_COUNT = 10**7


@dataclass(frozen=True)
class StatedSettings:
    """What a log states of its job; None where it does not.

    `strategy`, `precision` and `optimizer` are the words of the log, to be read as free text.
    """

    model_name: str | None = None
    num_parameters: int | None = None
    trainable_parameters: int | None = None  # where peft counts them
    ranks: int | None = None
    micro_batch: int | None = None
    sequence_length: int | None = None
    accumulate: int | None = None
    activation_checkpointing: bool | None = None
    optimizer: str | None = None
    strategy: str | None = None
    precision: str | None = None

    def filled_from(self, later: StatedSettings) -> StatedSettings:
        """Return these settings, with those of `later` where there are none."""
        missing = {
            f.name: getattr(later, f.name) for f in fields(self) if getattr(self, f.name) is None
        }
        return replace(self, **missing)


NOTHING_STATED = StatedSettings()
_KEYS: dict[str, str] = {
    "model_name": r"model[-_]name[-_]or[-_]path|_name_or_path|base[-_]model(?:[-_]name[-_]or[-_]path)?"
    r"|pretrained[-_]model[-_]name[-_]or[-_]path|model[-_](?:name|id|path|tag|dir)|--model(?![\w-])",
    "ranks": r"nproc[-_]per[-_]node|num[-_]gpus|num[-_]processes|world[-_]size|n_gpus?(?:_per_node)?"
    r"|NPROC_PER_NODE|WORLD_SIZE|tensor[-_]parallel[-_]size",
    "micro_batch": r"per[-_]device[-_]train[-_]batch[-_]size|micro[-_]batch[-_]size"
    r"|train_micro_batch_size_per_gpu|Instantaneous batch size per (?:device|GPU)"
    r"|per_device_batch_size",
    "sequence_length": r"max[-_]seq(?:uence)?[-_]len(?:gth)?|cutoff[-_]len|sequence[-_]len(?:gth)?"
    r"|seq[-_]length|model[-_]max[-_]length|block[-_]size",
    "accumulate": r"gradient[-_]accumulation[-_]steps",
    "activation_checkpointing": r"gradient[-_]checkpointing|activation[-_]checkpointing",
    "optimizer": r"--optim|\boptim(?:izer)?(?=['\"]?\s?[=:])",
    "stage": r"zero[-_]stage|['\"]stage['\"]|zero_optimization['\"]?:?\s{0,20}\{?\s{0,20}['\"]?stage",
    "fsdp": r"fsdp(?:_sharding_strategy)?(?=['\"]?\s?[=: ]\s?['\"]?(?:\[['\"])?(?:full_shard|FULL_SHARD|shard_grad"
    r"|SHARD_GRAD|hybrid|HYBRID|no_shard|NO_SHARD|1\b|2\b))",
    "half": r"(?:bf16|fp16)(?:_full_eval)?(?=['\"]?\s?[=: ]\s?[Tt]rue)|--(?:bf16|fp16)(?=\s)",
}
# A value of a name ends at a quote, a comma or a space; a quoted key may precede it.
_SETTING = re.compile(
    r"(?=[-'\"_INWabcfgmnopstwz])(?<![A-Za-z0-9])(?:"
    + "|".join(f"(?P<{name}>{words})" for name, words in _KEYS.items())
    + ")"
)
_VALUE = re.compile(r"['\"`]?\s{0,4}(?:=|:|\s|->)\s{0,4}\[?['\"`]?([\w./:+@-]{1,160})", re.ASCII)
_FREE_TEXTS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (
        "model_name",
        re.compile(
            r"from_pretrained\(\s{0,20}f?['\"]([\w./:+@-]{3,160})['\"]|vllm serve ([\w./-]{3,160})"
        ),
    ),
    ("num_parameters", re.compile(r"\|\| all params: ([0-9,]{4,20})")),
    ("trainable_parameters", re.compile(r"trainable params: ([0-9,]{4,20})")),
    (
        "ranks",
        re.compile(
            r"\bworld size(?: is|:|=) ?([0-9]{1,5})|distributed .{0,20}world_size=([0-9]{1,5})"
        ),
    ),
)
_DEEPSPEED_CONFIG = re.compile(
    r"(?:zero|z|stage)[-_]?([123])(?:[-_.]\w{1,20}){0,3}\.(?:json|yaml|yml)\b", re.IGNORECASE
)
_OFFLOAD = re.compile(
    r"offload_(?P<what>optimizer|param)['\"]?\s{0,4}[:=]\s{0,4}(?:\{[^{}]{0,200}?)?['\"]?(?:device['\"]?\s{0,4}[:=]\s{0,4}['\"]?)?cpu"
    r"|offload_(?P<key>optimizer|param)_device['\"]?\s{0,4}[:=]\s{0,4}['\"]?cpu"
    r"|fsdp_offload_params['\"]?\s{0,4}[:=]\s{0,4}[Tt]rue"
)
_LAUNCHERS = re.compile(
    r"distributed_type['\"]?\s{0,4}[:=]\s{0,4}['\"]?(?:DistributedType\.)?(FSDP|DEEPSPEED|MULTI_GPU|NO)\b"
)
_NO_VALUES = ("auto", "none", "null", "false", "true", "type", "str", "int")


def settings_in(text: str) -> StatedSettings:
    """Return what `text` states of the job's settings."""
    found: dict[str, str] = {}
    for match in _SETTING.finditer(text):
        name = match.lastgroup or ""
        value = _VALUE.match(text, match.end())
        if value and name not in found and _is_value(name, value[1]):
            found[name] = value[1].rstrip(".,:;")
            if name == "half":
                found[name] = match[0]
    for name, expression in _FREE_TEXTS:
        stated = expression.search(text)
        if stated and name not in found:
            found[name] = next(group for group in stated.groups() if group)
    return StatedSettings(
        model_name=found.get("model_name"),
        num_parameters=_count(found.get("num_parameters"), most=10**13),
        trainable_parameters=_count(found.get("trainable_parameters"), most=10**13),
        ranks=_count(found.get("ranks"), most=100_000),
        micro_batch=_count(found.get("micro_batch")),
        sequence_length=_count(found.get("sequence_length")),
        accumulate=_count(found.get("accumulate")),
        activation_checkpointing=_flag(found.get("activation_checkpointing")),
        optimizer=found.get("optimizer"),
        strategy=_strategy(text, found),
        precision=found.get("half"),
    )


def _is_value(name: str, value: str) -> bool:
    if name == "half":
        return True
    if name == "activation_checkpointing":
        return _flag(value) is not None
    if value.lower() in _NO_VALUES or value.startswith("-"):
        return False
    if name == "model_name":
        return any(c.isdigit() for c in value)
    if name in ("optimizer", "fsdp"):
        return not value.isdigit() or name == "fsdp"
    return value.isdigit() and value != "0"


def _strategy(text: str, found: dict[str, str]) -> str | None:
    """Return the strategy in words: "DeepSpeed ZeRO-3, offload optimizer" or "FSDP full_shard"."""
    offloaded = [m["what"] or m["key"] or "all" for m in _OFFLOAD.finditer(text[:200_000])]
    offload = f", offload {' and '.join(sorted(set(offloaded)))}" if offloaded else ""
    stage = found.get("stage")
    by_name = _DEEPSPEED_CONFIG.search(text)
    if stage in ("1", "2", "3") and ("zero" in text.lower() or "deepspeed" in text.lower()):
        return f"DeepSpeed ZeRO-{stage}{offload}"
    if by_name and "deepspeed" in text.lower():
        named = "offload" in by_name[0].lower() and not offload
        return f"DeepSpeed ZeRO-{by_name[1]}{', offload' if named else offload}"
    launcher = _LAUNCHERS.search(text)
    if "fsdp" in found or (launcher and launcher[1] == "FSDP"):
        words = found.get("fsdp", "")
        return f"FSDP {words if not words.isdigit() else ''}{offload}".strip()
    if launcher and launcher[1] == "MULTI_GPU":
        return "MULTI_GPU (DDP)"
    return None


def _count(digits: str | None, *, most: int = _LARGEST_COUNT) -> int | None:
    cleaned = (digits or "").replace(",", "")
    if not cleaned.isdigit() or len(cleaned) > 15:
        return None
    return int(cleaned) if 0 < int(cleaned) <= most else None


def _flag(word: str | None) -> bool | None:
    return {"true": True, "false": False, "1": True, "0": False}.get((word or "").lower())
