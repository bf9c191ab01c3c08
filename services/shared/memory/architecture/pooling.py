"""How a model reads a text: which hidden states represent it, and the prefix it was trained with.

sentence-transformers writes both next to the weights: `modules.json` names a directory (`1_Pooling`) whose
config.json has the pooling, and `config_sentence_transformers.json` the prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any

from services.shared.memory.architecture.safetensors_headers import parse_json, read_json
from services.shared.memory.errors import InvalidInput

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
POOLING_DIR = "1_Pooling"
CONFIG_KEY = "classifier_pooling"  # in config.json, as ModernBERT's has it


class Pooling(str, Enum):
    """The hidden states that represent a text."""

    LAST = (
        "last"  # the last real token: the only one that a causal model computes from the whole text
    )
    FIRST = "first"  # the leading special token of an encoder
    MEAN = "mean"  # the mean over all real tokens

    __str__ = str.__str__

    @property
    def config_value(self) -> str:
        """Return the value of `classifier_pooling` in config.json."""
        return "cls" if self is Pooling.FIRST else str(self)


# sentence-transformers' modes in its Pooling config: one flag each, or since 5.0 one `pooling_mode`.
_MODES = {"cls": Pooling.FIRST, "lasttoken": Pooling.LAST, "mean": Pooling.MEAN}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


def checkpoint_pooling(directory: Path) -> Pooling | None:
    """Return the pooling in a checkpoint's sentence-transformers files, None where it has none.

    Raises InvalidInput for a pooling that is not supported.
    """
    file = directory / MODULES_FILE
    if not file.is_file():
        return None
    modules = parse_json(file)
    for module in modules if isinstance(modules, list) else []:
        if isinstance(module, dict) and str(module.get("type", "")).endswith(".Pooling"):
            return _pooling(directory / str(module.get("path", POOLING_DIR)) / "config.json")
    return None


def checkpoint_prefix(directory: Path) -> str:
    """Return the prompt that sentence-transformers puts before each text by default; "" without one."""
    file = directory / PROMPTS_FILE
    if not file.is_file():
        return ""
    config = read_json(file)
    prompts, name = config.get("prompts"), config.get("default_prompt_name")
    if name is None or not isinstance(prompts, Mapping):
        return ""
    return str(prompts.get(name, ""))


def config_pools_by_mean(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json asks for mean pooling."""
    return bool(config.get(CONFIG_KEY) == Pooling.MEAN.config_value)


def _pooling(file: Path) -> Pooling:
    config = read_json(file)
    named = config.get("pooling_mode")
    if isinstance(named, str):
        modes = [named]
    else:
        modes = [mode for flag, mode in _FLAGS.items() if config.get(flag)] or ["mean"]
    found = _MODES.get(modes[0]) if len(modes) == 1 else None
    if found is None or config.get("include_prompt") is False:
        without = " without the prompt" if config.get("include_prompt") is False else ""
        raise InvalidInput(
            "model",
            f"{file} pools by {' and '.join(modes)}{without}; set pooling to what should be used instead",
            accepted=Pooling,
        )
    return found
