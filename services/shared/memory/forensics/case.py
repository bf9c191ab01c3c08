"""The description of a failed job; every field is optional."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics.free_text import Framework, read_strategy
from services.shared.memory.recipe import OptimizerImpl, Precision, Sharding

_LARGEST_COUNT = 10**15
# Many times the longest of the published reports: 54 characters of a strategy, 4 versions.
_LONGEST_TEXT = 2_000
_LONGEST_LOG = 16 * 2**20  # characters
_MOST_ITEMS = 1_000  # of a list or an object
Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Observed:
    """What the probe on a rank measured after wrapping, before the first step."""

    sharded_units: int | None = None
    local_parameter_bytes: int | None = None
    expected_parameter_bytes: int | None = None
    allocated_after_wrap_bytes: int | None = None
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """What is known of a failed job. Free text is kept as it was written.

    `ignored` names unknown fields of the input, so that a misspelt one is noticed.
    """

    log: str = ""
    exit_code: int | None = None
    out_of_memory: bool | None = None  # the reporter says so, where the message is lost
    phase: str | None = None
    step: int | None = None
    model_name: str | None = None
    model: Mapping[str, Any] = field(default_factory=dict)
    heads: tuple[int, ...] = ()
    ranks: int | None = None
    device: str | None = None
    device_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    parameters: Precision | None = None
    optimizer: str | None = None
    optimizer_impl: OptimizerImpl | None = None
    optimizer_in_backward: bool | None = None
    sharding: Sharding | None = None
    framework: Framework | None = None
    sharding_strategy: str | None = None
    wrap_policy: str | None = None
    precision: str | None = None
    micro_batch: int | None = None
    sequence_length: int | None = None
    accumulate: int | None = None
    activation_checkpointing: bool | None = None
    offload: str | None = None
    observed: Observed = Observed()
    versions: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Case:
        """Read a case from plain values; unknown fields are kept by name in `ignored`.

        Raises InvalidInput naming the field whose value is invalid.
        """
        if not isinstance(value, Mapping):
            raise InvalidInput("case", f"{type(value).__name__} is not an object of named fields")
        if len(value) > _MOST_ITEMS:
            raise InvalidInput("case", f"{len(value)} fields", accepted=f"at most {_MOST_ITEMS}")
        known: dict[str, Any] = {}
        ignored: list[str] = []
        for name, content in value.items():
            target = _OTHER_NAMES.get(name, name)
            if target not in _READERS:
                ignored.append(str(name)[:_LONGEST_TEXT])
            elif content is not None:
                known[target] = _READERS[target](target, content)
        return cls(**known, ignored=tuple(sorted(ignored)))

    @property
    def free_text(self) -> str:
        """Return all free text except the log, to search for names."""
        texts = (self.model_name, self.sharding_strategy, self.wrap_policy, self.precision)
        return "; ".join(text for text in (*texts, self.device, self.phase) if text)


_OTHER_NAMES = {"gradient_accumulation_steps": "accumulate", "world_size": "ranks"}


def _text(name: str, value: Any) -> str:
    return _text_up_to(_LONGEST_TEXT, name, value)


def _log(name: str, value: Any) -> str:
    return _text_up_to(_LONGEST_LOG, name, value)


def _text_up_to(most_characters: int, name: str, value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        raise InvalidInput(name, "the number is too large")
    if not isinstance(value, (str, int, float)):
        raise InvalidInput(name, f"{type(value).__name__} is not text")
    text = str(value)
    if len(text) > most_characters:
        raise InvalidInput(
            name, f"{len(text)} characters", accepted=f"at most {most_characters} characters"
        )
    return text


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidInput(name, f"{_excerpt(value)} is not a whole number")
    # The range first: it holds for no infinity, and an integer of 5,000 digits cannot be printed.
    if not 0 <= value <= _LARGEST_COUNT:
        raise InvalidInput(name, "the number is out of range", accepted=f"0 to {_LARGEST_COUNT}")
    if value != int(value):
        raise InvalidInput(name, f"{value!r} is not a whole number")
    return int(value)


def _positive(name: str, value: Any) -> int | None:
    # Web forms send zero for a number that was left out.
    return _count(name, value) or None


def _exit_code(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -255 <= value <= 255:
        raise InvalidInput(name, "not an exit code", accepted="-255 to 255")
    return value


def _flag(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in (
        "true",
        "yes",
        "on",
        "false",
        "no",
        "off",
    ):
        return value.strip().lower() in ("true", "yes", "on")
    raise InvalidInput(name, f"{_excerpt(value)} is neither true nor false")


def _mapping(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(name, f"{type(value).__name__} is not an object of named fields")
    if len(value) > _MOST_ITEMS:
        raise InvalidInput(name, f"{len(value)} fields", accepted=f"at most {_MOST_ITEMS}")
    for key, content in value.items():
        if isinstance(content, (str, int)):
            _text(f"{name}.{str(key)[:80]}", content)
    return dict(value)


def _excerpt(value: Any) -> str:
    return (
        f"{value[:80]!r}" if isinstance(value, str) else f"a value of type {type(value).__name__}"
    )


def _one_of(kind: Callable[[str], Kind], accepted: str) -> Callable[[str, Any], Kind]:
    def read(name: str, value: Any) -> Kind:
        try:
            return kind(_text(name, value).strip().lower().replace("-", "_"))
        except InvalidInput:
            raise
        except ValueError as error:
            raise InvalidInput(name, _excerpt(value), accepted=accepted) from error

    return read


def _classes(name: str, value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidInput(name, f"{_excerpt(value)} is not a list of numbers of classes")
    if len(value) > _MOST_ITEMS:
        raise InvalidInput(name, f"{len(value)} heads", accepted=f"at most {_MOST_ITEMS}")
    return tuple(_count(f"{name}[{index}]", item) for index, item in enumerate(value))


def _observed(name: str, value: Any) -> Observed:
    content = _mapping(name, value)
    found: dict[str, Any] = {}
    for key in (f.name for f in fields(Observed)):
        given = content.get(key)
        if given is None:
            continue
        if key == "dtypes":
            names = given if isinstance(given, (list, tuple, Mapping)) else [given]
            if len(names) > _MOST_ITEMS:
                raise InvalidInput(f"{name}.dtypes", f"{len(names)} types")
            found[key] = tuple(_text(f"{name}.dtypes", n).removeprefix("torch.") for n in names)
        else:
            found[key] = _count(f"{name}.{key}", given)
    return Observed(**found)


def _framework(name: str, value: Any) -> Framework:
    found = read_strategy(_text(name, value)).framework
    return found or _one_of(Framework, _members(Framework))(name, value)


def _sharding(name: str, value: Any) -> Sharding:
    found = read_strategy(_text(name, value)).sharding
    return found or _one_of(Sharding, _members(Sharding))(name, value)


def _members(kind: type[Any]) -> str:
    return ", ".join(str(member) for member in kind)


_PRECISION_WORDS = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}


def _precision(name: str, value: Any) -> Precision:
    word = _text(name, value).strip().lower().removeprefix("torch.")
    return _one_of(Precision, _members(Precision))(name, _PRECISION_WORDS.get(word, word))


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "log": _log,
    "exit_code": _exit_code,
    "out_of_memory": _flag,
    "phase": _text,
    "step": _count,
    "model_name": _text,
    "model": _mapping,
    "heads": _classes,
    "ranks": _positive,
    "device": _text,
    "device_memory_bytes": _positive,
    "host_memory_bytes": _positive,
    "parameters": _precision,
    "optimizer": _text,
    "optimizer_impl": _one_of(OptimizerImpl, _members(OptimizerImpl)),
    "optimizer_in_backward": _flag,
    "sharding": _sharding,
    "framework": _framework,
    "sharding_strategy": _text,
    "wrap_policy": _text,
    "precision": _text,
    "micro_batch": _positive,
    "sequence_length": _positive,
    "accumulate": _positive,
    "activation_checkpointing": _flag,
    "offload": _text,
    "observed": _observed,
    "versions": _mapping,
}
assert {f.name for f in fields(Case)} == {*_READERS, "ignored"}
