"""Lines to paste: every one parses in the form of its launcher, and names settings that exist."""

import ast
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from transformers import TrainingArguments

from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import Cause, Launcher, LauncherLine
from services.shared.memory.forensics.evidence import Evidence, gather_evidence
from services.shared.memory.forensics.remedies.direct_fixes import direct_fixes
from services.shared.memory.forensics.remedies.launcher_lines import lines_of_changes

DATA = Path(__file__).parents[3] / "data"
CASES = [fault["case"] for fault in json.loads((DATA / "oom_faults.json").read_text())]
CASES += [report["case"] for report in json.loads((DATA / "oom_reports_c.json").read_text())]
STRATEGIES = ("FSDP2", "DeepSpeed ZeRO-2", "DeepSpeed ZeRO-3", "DDP", "FSDP LoRA", "")
CHANGES: tuple[dict[str, str | int | bool | None], ...] = (
    {"optimizer": "adafactor"},
    {"optimizer": "adamw_8bit"},
    {"optimizer": "adamw_bf16", "parameters": "bfloat16"},
    {"optimizer_impl": "fused"},
    {"optimizer_in_backward": True},
    {"activation_checkpointing": True},
    {"micro_batch": 2, "accumulate": 8},
    {"attention": "sdpa"},
    {"reduce_each": True},
    {"offload": "all"},
    {"offload": "optimizer"},
    {"engine": "fsdp2", "sharding": "full"},
    {"wrap": "layer"},
)


def evidence_of(strategy: str) -> Evidence:
    return gather_evidence(Case(sharding_strategy=strategy, ranks=8))


def every_line() -> list[LauncherLine]:
    found: dict[LauncherLine, None] = {}
    for strategy in STRATEGIES:
        evidence = evidence_of(strategy)
        for changes in CHANGES:
            found |= dict.fromkeys(lines_of_changes(evidence, changes))
        for cause in Cause:
            for fix in direct_fixes(evidence, cause):
                found |= dict.fromkeys(fix.lines)
    for case in CASES:
        for remedy in diagnose(Case.from_dict(case)).remedies:
            found |= dict.fromkeys(remedy.lines)
    return list(found)


@pytest.fixture(scope="module")
def lines() -> list[LauncherLine]:
    return every_line()


def test_every_launcher_is_served(lines: list[LauncherLine]) -> None:
    assert {line.launcher for line in lines} == set(Launcher)


def test_every_line_is_one_line_that_parses(lines: list[LauncherLine]) -> None:
    for line in lines:
        assert "\n" not in line.line
        match line.launcher:
            case Launcher.DEEPSPEED:
                assert isinstance(json.loads(line.line), dict)
            case Launcher.ACCELERATE | Launcher.COMPOSE | Launcher.KUBERNETES:
                assert isinstance(yaml.safe_load(line.line), dict), line
            case Launcher.PYTHON:
                ast.parse(line.line)
            case Launcher.SLURM:
                assert line.line.startswith("#SBATCH --")
            case _:
                assert shlex.split(line.line, comments=True), line


def test_arguments_of_transformers_exist(lines: list[LauncherLine]) -> None:
    known = {field.name for field in fields(TrainingArguments)}
    for line in lines:
        if line.launcher is Launcher.TRANSFORMERS:
            options = re.findall(r"--(\w+)", line.line)
            assert options
            assert set(options) <= known, line


def test_fsdp_gets_no_line_of_deepspeed_and_zero_gets_it_first() -> None:
    fsdp = lines_of_changes(evidence_of("FSDP2"), {"micro_batch": 2, "accumulate": 8})
    assert Launcher.DEEPSPEED not in {line.launcher for line in fsdp}
    zero = lines_of_changes(evidence_of("ZeRO-3"), {"micro_batch": 2, "accumulate": 8})
    assert zero[0].launcher is Launcher.DEEPSPEED
    assert json.loads(zero[0].line)["train_micro_batch_size_per_gpu"] == 2


def test_the_allocators_variable_is_that_of_the_back_end() -> None:
    message = "HIP out of memory. Tried to allocate 2.00 GiB."
    hip = gather_evidence(Case(log=message))
    (fix,) = direct_fixes(hip, Cause.FRAGMENTATION)
    assert fix.lines[0].line == "export PYTORCH_HIP_ALLOC_CONF=expandable_segments:True"
