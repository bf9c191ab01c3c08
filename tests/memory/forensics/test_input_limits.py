"""A case is a stranger's text: no field of it takes more than linear time, and all have a limit."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.free_text import (
    parameters_in_name,
    read_device,
    read_optimizer,
    read_phase,
    read_precision,
    read_strategy,
    vocabulary_in,
)

TEXT_FIELDS = (
    "phase",
    "model_name",
    "device",
    "optimizer",
    "sharding_strategy",
    "wrap_policy",
    "precision",
    "offload",
)
# A beginning that a pattern looks for, and what its repetitions take.
HOSTILE = [
    ("stage", " "),
    ("zero", "-"),
    ("", "z"),
    ("", "-instruct"),
    ("", "-v1.1"),
    ("1", "1"),
    ("", "1.1"),
    ("vocab", " "),
    ("reshard_after_forward", " "),
    ("fp32", "-"),
    ("pure ", "bf16-"),
    ("cast", "cast"),
    ("", "cast a "),
    ("", "data "),
    ("", "8 "),
    ("HCU", "1"),
    ("", "("),
    ("", "\n"),
]
SLACK_SECONDS = 0.05  # of a machine that does other things


def _seconds(act: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        act()
        best = min(best, time.perf_counter() - started)
    return best


def _grows_linearly(act: Callable[[int], object], *, length: int) -> None:
    short, long = _seconds(lambda: act(length)), _seconds(lambda: act(2 * length))
    assert long <= 2.5 * short + SLACK_SECONDS


def _filled(begin: str, fill: str, length: int) -> str:
    return (begin + fill * length)[:length]


@pytest.mark.parametrize("field", TEXT_FIELDS)
def test_a_field_twice_as_long_takes_at_most_twice_the_time(field: str) -> None:
    for begin, fill in HOSTILE:
        _grows_linearly(
            lambda length, b=begin, f=fill: diagnose(
                Case.from_dict({field: _filled(b, f, length)})
            ),  # type: ignore[misc]
            length=1000,
        )


@pytest.mark.parametrize(
    "read",
    [
        read_strategy,
        read_precision,
        read_optimizer,
        read_phase,
        read_device,
        vocabulary_in,
        parameters_in_name,
    ],
)
def test_the_patterns_are_linear_even_without_the_limit_on_length(
    read: Callable[[str], object],
) -> None:
    for begin, fill in HOSTILE:
        _grows_linearly(lambda length, b=begin, f=fill: read(_filled(b, f, length)), length=5000)  # type: ignore[misc]


@pytest.mark.parametrize(("begin", "fill"), HOSTILE)
def test_a_log_twice_as_long_takes_at_most_twice_the_time(begin: str, fill: str) -> None:
    def read(length: int) -> None:
        diagnose(Case.from_dict({"log": "CUDA out of memory " + _filled(begin, fill, length)}))

    _grows_linearly(read, length=100_000)


def test_the_reported_request_is_answered_at_once() -> None:
    started = time.perf_counter()
    diagnose(Case.from_dict({"sharding_strategy": "stage" + " " * 1990}))
    assert time.perf_counter() - started < 1  # 35 s before the repetitions were bounded


@pytest.mark.parametrize("field", [*TEXT_FIELDS, "framework", "sharding", "parameters"])
def test_a_long_text_is_refused_with_its_field(field: str) -> None:
    with pytest.raises(InvalidInput, match="2000 characters") as refusal:
        Case.from_dict({field: "a" * 2001})
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("case", "field"),
    [
        ({"ranks": 10**5000}, "ranks"),
        ({"ranks": float("inf")}, "ranks"),
        ({"ranks": float("nan")}, "ranks"),
        ({"exit_code": 10**5000}, "exit_code"),
        ({"phase": 10**5000}, "phase"),
        ({"activation_checkpointing": 10**5000}, "activation_checkpointing"),
        ({"optimizer_impl": 10**5000}, "optimizer_impl"),
        ({"heads": 10**5000}, "heads"),
        ({"heads": [2] * 1001}, "heads"),
        ({"heads": [10**5000]}, "heads[0]"),
        ({"versions": {str(i): "1" for i in range(1001)}}, "versions"),
        ({"versions": {"torch": "1" * 2001}}, "versions.torch"),
        ({"model": {"hidden_size": 10**5000}}, "model.hidden_size"),
        ({"observed": {"dtypes": ["float32"] * 1001}}, "observed.dtypes"),
        ({"observed": {"dtypes": ["x" * 2001]}}, "observed.dtypes"),
        ({str(i): 1 for i in range(1001)}, "case"),
    ],
)
def test_what_is_too_large_is_refused_with_its_field(case: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        Case.from_dict(case)
    assert refusal.value.field == field
    assert len(str(refusal.value)) < 500


def test_a_version_of_many_digits_is_read_in_linear_time() -> None:
    diagnose(Case.from_dict({"log": "CUDA out of memory", "versions": {"torch": "1" * 2000}}))
