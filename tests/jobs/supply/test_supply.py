"""Every malicious model directory is refused in one sentence, quickly and before anything large is read."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from services.shared.jobs.supply.check import ModelSupply
from services.shared.sandbox.limits import Limits
from services.shared.sandbox.sandbox import Sandbox
from tests.jobs.supply.corpus import MALICIOUS, Malicious, write_honest
from tests.sandboxes import sandboxes

MIB = 2**20


@pytest.fixture(scope="module")
def supply() -> ModelSupply:
    limits = Limits(seconds=2, wall_seconds=120, memory_bytes=512 * MIB)
    return ModelSupply(Sandbox(sandboxes().calculations.server, limits=limits))


def test_an_honest_directory_is_accepted(tmp_path: Path, supply: ModelSupply) -> None:
    assert supply.refusal(write_honest(tmp_path / "model")) is None


@pytest.mark.parametrize("case", MALICIOUS, ids=lambda case: case.name)
def test_a_malicious_directory_is_refused_in_one_sentence(
    tmp_path: Path, supply: ModelSupply, case: Malicious
) -> None:
    directory = write_honest(tmp_path / "model")
    case.change(directory)
    refusal = supply.refusal(directory)
    assert refusal is not None
    assert case.says in refusal
    assert len(refusal) < 400
    assert "\n" not in refusal
    assert str(directory) not in refusal


def test_an_unchanged_directory_is_checked_once(tmp_path: Path, supply: ModelSupply) -> None:
    directory = write_honest(tmp_path / "model")
    assert supply.refusal(directory) is None
    started = time.perf_counter()
    for _ in range(20):
        supply.refusal(directory)
    assert time.perf_counter() - started < 0.5
    (directory / "modeling.py").write_text("")
    assert supply.refusal(directory) is not None
