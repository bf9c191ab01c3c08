"""Reports that were once diagnosed wrongly, and logs that no mutation makes fail."""

import json
import random
from pathlib import Path
from typing import TypedDict

import pytest

from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import Cause, Confidence, Diagnosis, Strength
from services.shared.memory.oom_log.log_scanner import read_log
from services.shared.memory.sizes import GIB, MIB
from tests.fuzz.logs import mutated


class Fault(TypedDict):
    """A case, what its diagnosis must say, and the causes that say it."""

    id: str
    kind: str
    case: dict[str, object]
    expect: str
    causes: list[str]


DATA = Path(__file__).parents[2] / "data"
FAULTS: list[Fault] = json.loads((DATA / "oom_faults.json").read_text())
CASES = {fault["id"]: fault["case"] for fault in FAULTS}
MUTATIONS = 400


def diagnosis_of(name: str) -> Diagnosis:
    return diagnose(Case.from_dict(CASES[name]))


@pytest.mark.parametrize("fault", FAULTS, ids=[fault["id"] for fault in FAULTS])
def test_every_fault_gets_its_cause(fault: Fault) -> None:
    assert str(diagnose(Case.from_dict(fault["case"])).cause) in fault["causes"]


@pytest.mark.parametrize("name", ["no-message-1", "no-message-2", "no-message-3", "slurm-time"])
def test_no_message_gives_no_verdict(name: str) -> None:
    found = diagnosis_of(name)
    assert found.confidence is Confidence.UNDECIDED
    assert all(h.strength < Strength.LIKELY for h in found.hypotheses)


def test_a_configuration_alone_says_only_what_would_not_fit() -> None:
    beyond = diagnosis_of("no-message-1")
    assert [h.what.startswith("would not fit") for h in beyond.hypotheses] == [True]
    small = {**CASES["no-message-1"], "model_name": "Qwen3-0.6B"}
    found = diagnose(Case.from_dict(small))
    assert not found.hypotheses
    assert not found.remedies


def test_the_summary_says_what_was_searched() -> None:
    assert "No out-of-memory message was found in 1 line;" in diagnosis_of("no-message-1").summary
    assert "input is empty" in diagnosis_of("no-message-3").summary
    assert "time limit" in diagnosis_of("slurm-time").summary


@pytest.mark.parametrize("name", list(CASES))
def test_at_most_one_explanation_is_likely(name: str) -> None:
    hypotheses = diagnosis_of(name).hypotheses
    assert sum(h.strength is Strength.LIKELY for h in hypotheses) <= 1


def test_a_finished_step_refutes_whole_weights_on_every_card() -> None:
    found = diagnosis_of("qlora-strategy")
    excluded = {h.cause for h in found.hypotheses if h.strength is Strength.EXCLUDED}
    assert Cause.NOT_SHARDED in excluded
    assert found.needs is not None
    assert found.needs.whole_weights_bytes < 40 * GIB


def test_remedies_name_what_to_set() -> None:
    assert "set_device(local_rank)" in diagnosis_of("own-ranks").remedies[0].change
    assert "--shm-size" in diagnosis_of("wording-9").remedies[0].change
    assert "GiB of weights a rank" in diagnosis_of("zero3-lora-load").remedies[0].change
    assert "what else is in host memory" in diagnosis_of("offload-host").remedies[0].change


def test_numbers_are_read_without_the_words() -> None:
    message = diagnosis_of("wording-13").message
    assert message is not None
    assert message.requested is not None
    assert message.requested.size_bytes == 3384 * MIB
    killed = diagnosis_of("kernel-line").message
    assert killed is not None
    assert killed.process is not None
    assert killed.process.size_bytes == 64210944 * 1024


def test_mutated_logs_never_raise() -> None:
    chance = random.Random(16)
    logs = [str(case.get("log", "")) for case in CASES.values()]
    logs += [s["message"] for s in json.loads((DATA / "oom_messages.json").read_text())]
    for _ in range(MUTATIONS):
        read_log(mutated(chance.choice(logs), chance))
    for name, case in CASES.items():
        changed = {**case, "log": mutated(str(case.get("log", "")), chance)}
        assert json.dumps(diagnose(Case.from_dict(changed)).to_dict()), name
